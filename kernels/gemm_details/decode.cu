// W4A4 product for few tokens on tensor cores without FP4: y[token][row] = sum_k W[row][k] X[token][k].
//
// Both operands arrive as E2M1 codes and E4M3 block scales, are decoded in registers to bf16 (exact: code * block
// scale has six significant bits) and go through mma.sync.m16n8k16 with the weight as the A operand. One thread block
// owns 64 ROW_WARPS weight rows and TOKENS tokens; the K_WARPS warps of a row tile share K by runs of SUPER chunks. A
// chunk is four scale blocks, one for each of the four lanes of a quad, so that a lane needs one scale per row and
// chunk. Each warp streams its chunks through its own ring in shared memory (cp.async); only the final sum over the
// warps needs a barrier.
// A warp's copies cover whole 128-byte lines: with 32-byte requests the L2 cache is the limit (measured, NOTES-gemm.md).
//
// RAC: a block that the residual repeats is multiplied while its decoded weight is still in registers, so the
// duplicated columns cost neither memory traffic nor a second decode.
//
// Compiled by NVRTC with -D: TOKENS, K_WARPS, ROW_WARPS, STAGES, SUPER, RESIDUAL, GROUPED, SWIGLU, OUT_FLOAT, MIN_BLOCKS.
// Prepacked weight (see prepack.py), for each tile of 64 rows and each block of 16 along K:
//   codes  512 bytes: [i 4][g 8][h 2][8 bytes], row = 16 i + 8 h + g; bits of each 32-bit word moved, see `pair_packed`
//   scales  64 bytes: [g 8][i 4][h 2], E5M3 with bias 10 (every E4M3 value as a normal number), 0xFF = NaN

constexpr int WARPS = K_WARPS * ROW_WARPS, ROWS = ROW_WARPS * 64;
constexpr int N_TILES = TOKENS / 8;
constexpr int SETS = RESIDUAL ? 2 : 1;  // activation sets: main, residual
// Strides that keep the fragment loads free of bank conflicts.
constexpr int CODE_STRIDE = 544, SCALE_STRIDE = 96, TOKEN_STRIDE = SUPER * 32 + (SUPER > 1 ? 32 : 0), SUM_STRIDE = ROWS + 4;
constexpr int STAGE_BYTES = 4 * (CODE_STRIDE + SCALE_STRIDE);
constexpr int SET_BYTES = TOKENS * TOKEN_STRIDE, TOKEN_BYTES = SETS * SET_BYTES;
constexpr int AHEAD = (STAGES - 2) / SUPER + 1;  // runs of activations in flight, so that they arrive with the weights
constexpr int WARP_BYTES = STAGES * STAGE_BYTES + (AHEAD + 1) * TOKEN_BYTES;

// Copy `bytes` of 16 (8) and fill the rest with zeros.
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy8(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

struct Operands {
    const u8* w_codes;   // [groups, N/64, KB, 512]
    const u8* w_scales;  // [groups, N/64, KB, 64]
    const float* w_outer;  // [groups] or [groups, 2] (gate, up)
    const u8* x_codes;   // [rows, (KB + S) * 8]
    const u8* x_scales;  // [rows, KB + S]
    const float* x_outer;  // [] or [rows]
    const int* blocks;   // [S] or [groups, S], the K blocks that the residual columns repeat
    void* out;           // [rows out, N] or [rows out, N/2] (SwiGLU)
    float* partial;      // [splits, output tiles, TOKENS * ROWS] where the grid splits K
    int* arrivals;       // [output tiles], zero between launches
    const int* slots;    // GROUPED: [token blocks * TOKENS], index of an output row, -1 where empty
    const int* groups;   // GROUPED: [token blocks], weight of each token block, -1 past the last
    int rows, n, tiles, k_blocks, extra, outer_per_row, slot_share, list_per_group;  // slot_share: output rows per activation row
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode_gemm(const Operands p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ int token_row[TOKENS], out_row[TOKENS];
    __shared__ float outer[TOKENS];
    __shared__ bool last;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int row_warp = warp / K_WARPS, tile = blockIdx.x * ROW_WARPS + row_warp, k_warp = warp % K_WARPS;
    const int split = blockIdx.z, splits = gridDim.z;
    release_next();
    if (GROUPED) wait_for_previous();
    const int group = GROUPED ? p.groups[blockIdx.y] : 0;
    if (group < 0) return;

    const int chunks = (p.k_blocks + 3) >> 2, slices = K_WARPS * splits, slice = split * K_WARPS + k_warp;
    const int runs = (chunks + SUPER - 1) / SUPER;
    const int steps = tile < p.tiles && slice < runs ? ((runs - 1 - slice) / slices + 1) * SUPER : 0;
    auto chunk_of = [&](int step) { return (step / SUPER * slices + slice) * SUPER + step % SUPER; };

    u8* ring = memory + warp * WARP_BYTES;
    u8* activations = ring + STAGES * STAGE_BYTES;
    short* position = reinterpret_cast<short*>(memory + WARPS * WARP_BYTES);
    const size_t unit = ((size_t)group * p.tiles + (tile < p.tiles ? tile : 0)) * p.k_blocks;
    const u8* w_codes = p.w_codes + unit * 512 + lane * 16;
    const u8* w_scales = p.w_scales + unit * 64 + (lane & 3) * 16;
    auto fetch_weights = [&](int step, int stage) {
        if (step >= steps) return;
        const int first = chunk_of(step) * 4;
        const u32 to = shared_address(ring + stage * STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool keep = first + i < p.k_blocks;
            copy16(to + i * CODE_STRIDE + lane * 16, w_codes + (size_t)(keep ? first + i : 0) * 512, keep ? 16 : 0);
        }
        const int block = first + (lane >> 2);
        const bool keep = block < p.k_blocks;
        if (lane < 16)
            copy16(to + 4 * CODE_STRIDE + (lane >> 2) * SCALE_STRIDE + (lane & 3) * 16,
                   w_scales + (size_t)(keep ? block : 0) * 64, keep ? 16 : 0);
    };
    fetch_weights(0, 0);  // nothing of the weight depends on what follows
    if (!GROUPED) wait_for_previous();

    if (threadIdx.x < TOKENS) {
        const int slot = blockIdx.y * TOKENS + threadIdx.x;
        const int target = GROUPED ? p.slots[slot] : (slot < p.rows ? slot : -1);
        const int row = target < 0 ? -1 : target / p.slot_share;
        out_row[threadIdx.x] = target;
        token_row[threadIdx.x] = row;
        outer[threadIdx.x] = row < 0 ? 0.0f : p.x_outer[p.outer_per_row ? row : 0];
    }
    if (RESIDUAL) {
        for (int i = threadIdx.x; i < p.k_blocks; i += WARPS * 32) position[i] = -1;
        __syncthreads();
        const int* blocks = p.blocks + (size_t)(p.list_per_group ? group : 0) * p.extra;
        for (int i = threadIdx.x; i < p.extra; i += WARPS * 32) position[blocks[i]] = (short)i;
    }
    const float w_outer = p.w_outer[SWIGLU ? group * 2 : group], up_outer = SWIGLU ? p.w_outer[group * 2 + 1] : 0.0f;
    __syncthreads();

    const int width = p.k_blocks + p.extra;
    const bool aligned = (width & 1) == 0;
    const u8* x_scales[N_TILES];
    bool live[N_TILES];
#pragma unroll
    for (int j = 0; j < N_TILES; j++) {
        const int row = token_row[j * 8 + g];
        live[j] = row >= 0;
        x_scales[j] = p.x_scales + (size_t)max(row, 0) * width;
    }
    auto residual_block = [&](int block) -> int {
        return block < p.k_blocks && position[block] >= 0 ? p.k_blocks + position[block] : -1;
    };
    auto fetch_tokens = [&](int run) {
        if (run * SUPER >= steps) return;
        const int first = (run * slices + slice) * SUPER * 4;
        const u32 to = shared_address(activations + run % (AHEAD + 1) * TOKEN_BYTES);
#pragma unroll
        for (int u = lane; u < TOKENS * SUPER * 2; u += 32) {
            const int token = u / (SUPER * 2), part = u % (SUPER * 2), block = first + part * 2;
            const int row = token_row[token], bytes = row < 0 ? 0 : min(max(p.k_blocks - block, 0) * 8, 16);
            const u8* from = p.x_codes + (bytes ? ((size_t)row * width + block) * 8 : 0);
            const u32 at = to + token * TOKEN_STRIDE + part * 16;
            if (aligned) {
                copy16(at, from, bytes);
            } else {
                copy8(at, from, min(bytes, 8));
                copy8(at + 8, from + (bytes > 8 ? 8 : 0), max(bytes - 8, 0));
            }
        }
        if (RESIDUAL)
#pragma unroll
            for (int u = lane; u < TOKENS * SUPER * 4; u += 32) {
                const int token = u / (SUPER * 4), part = u % (SUPER * 4), row = token_row[token];
                const int block = residual_block(first + part), bytes = row < 0 || block < 0 ? 0 : 8;
                copy8(to + SET_BYTES + token * TOKEN_STRIDE + part * 8,
                      p.x_codes + (bytes ? ((size_t)row * width + block) * 8 : 0), bytes);
            }
    };
    // Scale bytes of the activations go through registers, one chunk ahead.
    auto fetch_scales = [&](u32 (&s)[SETS][N_TILES], int step) {
        const int block = step < steps ? chunk_of(step) * 4 + t : p.k_blocks;
        const int extra = RESIDUAL ? residual_block(block) : -1;
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
            s[0][j] = block < p.k_blocks && live[j] ? __ldg(x_scales[j] + block) : 0;
            if (RESIDUAL) s[SETS - 1][j] = extra >= 0 && live[j] ? __ldg(x_scales[j] + extra) : 0;
        }
    };

    float acc[4][N_TILES][4] = {};
    u32 next_scale[SETS][N_TILES];
    fetch_scales(next_scale, 0);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s > 0) fetch_weights(s, s);
        if (s % SUPER == 0) fetch_tokens(s / SUPER);
        commit();
    }

    int stage = 0;
    for (int step = 0; step < steps; step++) {
        wait<STAGES - 2>();
        __syncwarp();
        const u8* at = ring + stage * STAGE_BYTES;
        const u8* tokens_at = activations + step / SUPER % (AHEAD + 1) * TOKEN_BYTES + step % SUPER * 32;
        uint4 words[4];
        u64 tokens[SETS][N_TILES];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = *reinterpret_cast<const uint4*>(at + t * CODE_STRIDE + i * 128 + g * 16);
        const uint2 packed_scales =
            *reinterpret_cast<const uint2*>(at + 4 * CODE_STRIDE + t * SCALE_STRIDE + g * 8);
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int j = 0; j < N_TILES; j++)
                tokens[set][j] = *reinterpret_cast<const u64*>(
                    tokens_at + set * SET_BYTES + (j * 8 + g) * TOKEN_STRIDE + t * 8);
        u32 x_scale[SETS][N_TILES];
        bool any = false;
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int j = 0; j < N_TILES; j++) x_scale[set][j] = token_scale(next_scale[set][j]);
        if (RESIDUAL) any = __any_sync(0xFFFFFFFFu, residual_block(chunk_of(step) * 4 + t) >= 0);
        fetch_scales(next_scale, step + 1);
        fetch_weights(step + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        if (step % SUPER == 0) fetch_tokens(step / SUPER + AHEAD);
        commit();

        const u32 w_scale[4][2] = {
            {weight_scale<0>(packed_scales.x), weight_scale<1>(packed_scales.x)},
            {weight_scale<2>(packed_scales.x), weight_scale<3>(packed_scales.x)},
            {weight_scale<0>(packed_scales.y), weight_scale<1>(packed_scales.y)},
            {weight_scale<2>(packed_scales.y), weight_scale<3>(packed_scales.y)}};

#define STEP(M)                                                                                               \
    {                                                                                                         \
        u32 a[4][4], b[SETS][N_TILES][2];                                                                     \
        _Pragma("unroll") for (int i = 0; i < 4; i++) {                                                       \
            const u32 low = (M) < 2 ? words[i].x : words[i].y, high = (M) < 2 ? words[i].z : words[i].w;      \
            weight_fragment<((M)&1) * 2>(a[i], low, high, w_scale[i]);                                        \
        }                                                                                                     \
        _Pragma("unroll") for (int set = 0; set < SETS; set++) {                                              \
            if (set && !any) continue;                                                                        \
            _Pragma("unroll") for (int j = 0; j < N_TILES; j++) {                                             \
                const u32 word = (M) < 2 ? (u32)tokens[set][j] : (u32)(tokens[set][j] >> 32);                 \
                b[set][j][0] = multiply(pair_linear<((M)&1) * 2>(word), x_scale[set][j]);                     \
                b[set][j][1] = multiply(pair_linear<((M)&1) * 2 + 1>(word), x_scale[set][j]);                 \
            }                                                                                                 \
            _Pragma("unroll") for (int i = 0; i < 4; i++)                                                     \
                _Pragma("unroll") for (int j = 0; j < N_TILES; j++)                                           \
                    mma(acc[i][j], a[i], b[set][j][0], b[set][j][1]);                                         \
        }                                                                                                     \
    }
        STEP(0) STEP(1) STEP(2) STEP(3)
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    // Sum over the warps of a row tile, in ascending order, then over the grid's splits, in ascending order.
    wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < N_TILES; j++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                sums[(k_warp * TOKENS + j * 8 + t * 2 + (c & 1)) * SUM_STRIDE + row_warp * 64 + i * 16 + (c >> 1) * 8 +
                     g] = acc[i][j][c];
    __syncthreads();
    auto sum_at = [&](int e) { return sums + e / ROWS * SUM_STRIDE + e % ROWS; };
    if (K_WARPS > 1) {
#pragma unroll 2
        for (int e = threadIdx.x; e < TOKENS * ROWS; e += WARPS * 32) {
            float total = *sum_at(e);
#pragma unroll
            for (int w = 1; w < K_WARPS; w++) total = __fadd_rn(total, sum_at(e)[w * TOKENS * SUM_STRIDE]);
            *sum_at(e) = total;
        }
    }
    if (splits > 1) {
        const size_t output_tile = (size_t)blockIdx.y * gridDim.x + blockIdx.x, all = (size_t)gridDim.y * gridDim.x;
        float4* partial = reinterpret_cast<float4*>(p.partial);
        constexpr int QUADS = TOKENS * ROWS / 4;
        __syncthreads();
        for (int q = threadIdx.x; q < QUADS; q += WARPS * 32)
            __stcg(partial + (split * all + output_tile) * QUADS + q, *reinterpret_cast<float4*>(sum_at(q * 4)));
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last = atomicAdd(p.arrivals + output_tile, 1) == splits - 1;
        __syncthreads();
        if (!last) return;
        if (threadIdx.x == 0) p.arrivals[output_tile] = 0;
        __threadfence();
#pragma unroll 4
        for (int q = threadIdx.x; q < QUADS; q += WARPS * 32) {
            float4 total = __ldcg(partial + output_tile * QUADS + q);
#pragma unroll 4
            for (int s = 1; s < splits; s++) {
                const float4 more = __ldcg(partial + (s * all + output_tile) * QUADS + q);
                total.x = __fadd_rn(total.x, more.x), total.y = __fadd_rn(total.y, more.y);
                total.z = __fadd_rn(total.z, more.z), total.w = __fadd_rn(total.w, more.w);
            }
            *reinterpret_cast<float4*>(sum_at(q * 4)) = total;
        }
    }
    __syncthreads();

    const int first_row = blockIdx.x * ROWS;
    if (SWIGLU) {
        const int channels = p.n >> 1;
        for (int e = threadIdx.x; e < TOKENS * (ROWS / 2); e += WARPS * 32) {
            const int token = e / (ROWS / 2), c = e % (ROWS / 2), channel = first_row / 2 + c;
            if (out_row[token] < 0 || channel >= channels) continue;
            const float* sum = sums + token * SUM_STRIDE + (c >> 5) * 64 + ((c & 31) >> 3) * 16 + (c & 7);
            const float gate = __fmul_rn(sum[0] * UNSCALE, __fmul_rn(outer[token], w_outer));
            const float up = __fmul_rn(sum[8] * UNSCALE, __fmul_rn(outer[token], up_outer));
            reinterpret_cast<u16*>(p.out)[(size_t)out_row[token] * channels + channel] = (u16)to_bf16(swiglu(gate, up));
        }
        return;
    }
    for (int e = threadIdx.x; e < TOKENS * ROWS; e += WARPS * 32) {
        const int token = e / ROWS, row = first_row + e % ROWS;
        if (out_row[token] < 0 || row >= p.n) continue;
        const float y = __fmul_rn(*sum_at(e) * UNSCALE, __fmul_rn(outer[token], w_outer));
        const size_t at = (size_t)out_row[token] * p.n + row;
        if (OUT_FLOAT) reinterpret_cast<float*>(p.out)[at] = y;
        else reinterpret_cast<u16*>(p.out)[at] = (u16)to_bf16(y);
    }
}
