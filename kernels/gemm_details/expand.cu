// Operands and results of the large product: NVFP4 to bf16 (code * block scale, exact), and the epilogue on a float32
// product. All three are bound by memory; none rounds anything but the last cast.

// Codes P..P+1 of `word` in their natural order, times the scale; `scale` is scale * 2^107 twice.
template <bool PACKED>
__device__ __forceinline__ uint4 expand_word(u32 word, u32 scale) {
    const u32 unscale = 0x49004900u;  // 2^19
    u32 pair[4];
    pair[0] = PACKED ? pair_packed<0>(word) : pair_linear<0>(word);
    pair[1] = PACKED ? pair_packed<1>(word) : pair_linear<1>(word);
    pair[2] = PACKED ? pair_packed<2>(word) : pair_linear<2>(word);
    pair[3] = PACKED ? pair_packed<3>(word) : pair_linear<3>(word);
#pragma unroll
    for (int i = 0; i < 4; i++) pair[i] = multiply(multiply(pair[i], scale), unscale);
    return make_uint4(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[2], pair[3], 0x5410),
                      __byte_perm(pair[0], pair[1], 0x7632), __byte_perm(pair[2], pair[3], 0x7632));
}

struct TokenArguments {
    const u32* codes;   // [words]
    const u8* scales;   // [words / 2]
    uint4* out;         // bf16 [words * 8]
    long long words;
};
extern "C" __global__ void __launch_bounds__(256) expand_tokens(const TokenArguments p) {
    release_next();
    wait_for_previous();
    const long long stride = (long long)gridDim.x * 256;
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < p.words; i += stride)
        p.out[i] = expand_word<false>(__ldg(p.codes + i), token_scale(__ldg(p.scales + (i >> 1))));
}

// Prepacked weight to bf16 [N, (KB + S) * 16], the S repeated blocks appended. One thread block: 64 rows, 16 blocks.
struct WeightArguments {
    const u8* codes;    // [tiles, KB, 512]
    const u8* scales;   // [tiles, KB, 64]
    const int* blocks;  // [S]
    uint4* out;
    int n, k_blocks, extra;
};
extern "C" __global__ void __launch_bounds__(256) expand_weight(const WeightArguments p) {
    release_next();
    wait_for_previous();
    __shared__ __align__(16) u8 codes[16 * 520];  // 520: rows of one bank step apart
    __shared__ u8 scales[16 * 65];
    const int width = p.k_blocks + p.extra, first = blockIdx.x * 16, count = min(16, width - first);
    const size_t tile = (size_t)blockIdx.y * p.k_blocks;
    for (int i = threadIdx.x; i < count * 64; i += 256) {
        const int at = first + (i >> 6), source = at < p.k_blocks ? at : p.blocks[at - p.k_blocks];
        *reinterpret_cast<u64*>(codes + (i >> 6) * 520 + (i & 63) * 8) =
            *reinterpret_cast<const u64*>(p.codes + (tile + source) * 512 + (i & 63) * 8);
        scales[(i >> 6) * 65 + (i & 63)] = p.scales[(tile + source) * 64 + (i & 63)];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 32; i += 256) {
        const int row = i >> 5, block = (i & 31) >> 1, half = i & 1;
        const int part = row >> 4, h = (row >> 3) & 1, g = row & 7, n = blockIdx.y * 64 + row;
        if (block >= count || n >= p.n) continue;
        const u32 word = *reinterpret_cast<const u32*>(codes + block * 520 + part * 128 + g * 16 + h * 8 + half * 4);
        const u32 scale = weight_scale<0>(scales[block * 65 + g * 8 + part * 2 + h]);
        p.out[((size_t)n * width + first + block) * 2 + half] = expand_word<true>(word, scale);
    }
}

// y = cast(product * (outer_x * outer_w)); four columns a thread.
struct EpilogueArguments {
    const float4* product;  // [rows, n / 4]
    const float* x_outer;   // [] or [rows]
    const float* w_outer;   // []
    uint2* out;             // bf16
    long long quads;
    int quads_per_row, outer_per_row;
};
extern "C" __global__ void __launch_bounds__(256) scale_product(const EpilogueArguments p) {
    release_next();
    wait_for_previous();
    const long long stride = (long long)gridDim.x * 256;
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < p.quads; i += stride) {
        const float alpha = __fmul_rn(p.x_outer[p.outer_per_row ? i / p.quads_per_row : 0], p.w_outer[0]);
        const float4 v = __ldcs(p.product + i);
        p.out[i] = make_uint2(to_bf16(__fmul_rn(v.x, alpha)) | to_bf16(__fmul_rn(v.y, alpha)) << 16,
                              to_bf16(__fmul_rn(v.z, alpha)) | to_bf16(__fmul_rn(v.w, alpha)) << 16);
    }
}
