// Operands of the large products: NVFP4 to bf16 (code * block scale, exact). All three are bound by memory; a warp stores
// 512 contiguous bytes an instruction.

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

// Routed rows in slot order: row s of the result is activation row slots[s] / share, zeros where that slot is empty.
// Row blocks past the last (group -1) are left as they are. A warp takes one row.
struct RoutedArguments {
    const u32* codes;   // [rows, words]
    const u8* scales;   // [rows, words / 2]
    const int* slots;   // [row blocks * height], output row or -1
    const int* groups;  // [row blocks], -1 past the last
    uint4* out;         // bf16 [row blocks * height, words * 8]
    int words, share, height;
};
extern "C" __global__ void __launch_bounds__(256) expand_routed(const RoutedArguments p) {
    release_next();
    wait_for_previous();
    const int slot = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, target = p.slots[slot];
    if (p.groups[slot / p.height] < 0) return;
    uint4* out = p.out + (size_t)slot * p.words;
    if (target < 0) {
        for (int i = lane; i < p.words; i += 32) out[i] = make_uint4(0, 0, 0, 0);
        return;
    }
    const size_t row = target / p.share;
    const u32* codes = p.codes + row * p.words;
    const u8* scales = p.scales + row * (p.words >> 1);
#pragma unroll 4
    for (int i = lane; i < p.words; i += 32)
        out[i] = expand_word<false>(__ldg(codes + i), token_scale(__ldg(scales + (i >> 1))));
}

// 16 bytes from device memory to shared memory that is aligned to 8.
__device__ __forceinline__ void copy_to_shared(u8* to, const u8* from) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
    u64* pair = reinterpret_cast<u64*>(to);
    pair[0] = v.x | (u64)v.y << 32, pair[1] = v.z | (u64)v.w << 32;
}

// Prepacked weights to bf16 [experts, N, (KB + S) * 16], the S repeated blocks appended. Rows of an interleaved weight
// come as 2 channel + h (h = 0 gate, 1 up), so that both lie beside each other in the product. One thread block: 64
// rows, 16 blocks. Experts that no row block names are left as they are.
struct WeightArguments {
    const u8* codes;    // [experts, tiles, KB, 512]
    const u8* scales;   // [experts, tiles, KB, 64]
    const int* blocks;  // [S], or [experts, S]
    const int* groups;  // expert of each row block, or null: all experts are wanted
    uint4* out;
    int n, k_blocks, extra, list_per_group, row_blocks, interleaved;
};
extern "C" __global__ void __launch_bounds__(256) expand_weight(const WeightArguments p) {
    release_next();
    wait_for_previous();
    __shared__ __align__(8) u8 codes[16 * 520], scales[16 * 72];  // strides free of bank conflicts
    const int expert = blockIdx.z;
    if (p.groups) {
        bool wanted = false;
        for (int i = threadIdx.x; i < p.row_blocks; i += 256) wanted |= p.groups[i] == expert;
        if (!__syncthreads_or(wanted)) return;
    }
    const int width = p.k_blocks + p.extra, first = blockIdx.x * 16, count = min(16, width - first);
    const size_t tile = ((size_t)expert * gridDim.y + blockIdx.y) * p.k_blocks;
    const int* blocks = p.blocks + (p.list_per_group ? (size_t)expert * p.extra : 0);
    auto source = [&](int block) {
        const int at = first + block;
        return tile + (at < p.k_blocks ? at : __ldg(blocks + at - p.k_blocks));
    };
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 2
    for (int i = warp; i < count; i += 8)
        copy_to_shared(codes + i * 520 + lane * 16, p.codes + source(i) * 512 + lane * 16);
    if (threadIdx.x < count * 4)
        copy_to_shared(scales + (threadIdx.x >> 2) * 72 + (lane & 3) * 16,
                       p.scales + source(threadIdx.x >> 2) * 64 + (lane & 3) * 16);
    __syncthreads();
    // Row warp + 8 r of the result. In the tile: part r / 2, and g = warp, h = r % 2, or (interleaved)
    // g = warp / 2 + 4 (r % 2), h = warp % 2.
    const int block = lane >> 1, half = lane & 1, rows = p.n - blockIdx.y * 64 - warp;
    if (block >= count) return;
    const int g = p.interleaved ? warp >> 1 : warp, h = p.interleaved ? warp & 1 : 0;
    const int code_step = p.interleaved ? 64 : 8, scale_step = p.interleaved ? 32 : 1;
    const u8* code = codes + block * 520 + g * 16 + h * 8 + half * 4;
    const u8* scale = scales + block * 72 + g * 8 + h;
    uint4* out = p.out + (((size_t)expert * p.n + blockIdx.y * 64 + warp) * width + first + block) * 2 + half;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        if (8 * r >= rows) return;
        const u32 word = *reinterpret_cast<const u32*>(code + (r >> 1) * 128 + (r & 1) * code_step);
        out[(size_t)r * 16 * width] = expand_word<true>(word, weight_scale<0>(scale[(r >> 1) * 2 + (r & 1) * scale_step]));
    }
}
