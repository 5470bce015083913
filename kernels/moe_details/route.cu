// Routing of a grouped product, and the weighted sum over the experts of a token.

// One thread block: sort `pairs` (token, expert) pairs into blocks of `width` slots of one expert.
// Slots within an expert come in any order: rows of a product do not depend on their neighbours.
struct RouteArguments {
    const int* experts_of;  // [pairs], outside 0..experts-1: not routed
    int* slots;             // [max_blocks * width]
    int* groups;            // [max_blocks]
    int pairs, experts, width, max_blocks;
};
extern "C" __global__ void __launch_bounds__(1024) route(const RouteArguments p) {
    release_next();
    wait_for_previous();
    extern __shared__ int table[];  // counts, then first slots [experts], then the scan
    int* first = table + p.experts;
    __shared__ int sums[32];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    for (int e = thread; e < p.experts; e += 1024) table[e] = 0;
    for (int i = thread; i < p.max_blocks * p.width; i += 1024) p.slots[i] = -1;
    for (int i = thread; i < p.max_blocks; i += 1024) p.groups[i] = -1;
    __syncthreads();
    for (int i = thread; i < p.pairs; i += 1024) {
        const int e = p.experts_of[i];
        if (e >= 0 && e < p.experts) atomicAdd(table + e, 1);
    }
    __syncthreads();
    int carried = 0;
    for (int base = 0; base < p.experts; base += 1024) {  // exclusive scan of the blocks of each expert
        const int e = base + thread, blocks = e < p.experts ? (table[e] + p.width - 1) / p.width : 0;
        int scan = blocks;
        for (int d = 1; d < 32; d <<= 1) {
            const int other = __shfl_up_sync(0xFFFFFFFFu, scan, d);
            if (lane >= d) scan += other;
        }
        if (lane == 31) sums[warp] = scan;
        __syncthreads();
        int before = carried, all = carried;
        for (int w = 0; w < 32; w++) {
            if (w < warp) before += sums[w];
            all += sums[w];
        }
        if (e < p.experts) {
            const int start = before + scan - blocks;
            first[e] = start * p.width;
            for (int b = 0; b < blocks; b++) p.groups[start + b] = e;
        }
        carried = all;
        __syncthreads();
    }
    for (int i = thread; i < p.pairs; i += 1024) {
        const int e = p.experts_of[i];
        if (e >= 0 && e < p.experts) p.slots[atomicAdd(first + e, 1)] = i;
    }
}

// out[token] = cast(sum over k ascending of fl(weight[token][k] * y[token * top_k + k])), FP32; two columns a thread.
struct CombineArguments {
    const u32* y;            // bf16 [tokens * top_k, columns]
    const float* weights;    // [tokens, top_k]
    const int* experts_of;   // [tokens, top_k]
    void* out;
    int top_k, pairs_per_row, experts;
};
extern "C" __global__ void __launch_bounds__(256) combine(const CombineArguments p) {
    release_next();
    wait_for_previous();
    const int column = blockIdx.x * 256 + threadIdx.x, token = blockIdx.y;
    if (column >= p.pairs_per_row) return;
    float low = 0.0f, high = 0.0f;
    for (int k = 0; k < p.top_k; k++) {
        const size_t pair = (size_t)token * p.top_k + k;
        const int e = p.experts_of[pair];
        if (e < 0 || e >= p.experts) continue;
        const u32 two = __ldg(p.y + pair * p.pairs_per_row + column);
        const float weight = p.weights[pair];
        low = __fadd_rn(low, __fmul_rn(weight, __uint_as_float(two << 16)));
        high = __fadd_rn(high, __fmul_rn(weight, __uint_as_float(two & 0xFFFF0000u)));
    }
    const size_t at = (size_t)token * p.pairs_per_row + column;
    if (OUT_FLOAT) reinterpret_cast<float2*>(p.out)[at] = make_float2(low, high);
    else reinterpret_cast<u32*>(p.out)[at] = to_bf16(low) | to_bf16(high) << 16;
}
