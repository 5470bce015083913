// Grouped W4A4 product on tensor cores without FP4, for blocks of 8 to 32 rows of one expert each:
// y[row][n] = sum_k W[expert][n][k] X[row][k]. The arithmetic of decode.cu: both operands decoded to bf16 (exact) and
// multiplied by mma.sync.m16n8k16 with the weight as the A operand.
//
// A warp owns 64 weight rows and all of K; the ROW_WARPS warps of a thread block share the activations. A chunk is four
// scale blocks, one for each of the four lanes of a quad. In each round every warp decodes the activations of one chunk
// into shared memory, in the order of the B fragments, and after one barrier multiplies its own weights by all
// of them. Weights stream through a ring of each warp (cp.async, whole 128-byte lines) and are decoded in registers.
//
// RAC: the blocks that the residual repeats are multiplied first. A round of theirs has half as many chunks, each with
// two sets of activations, and a decoded weight is multiplied by both while it is in registers.
//
// Compiled by NVRTC with -D: TOKENS, ROW_WARPS, STAGES, RESIDUAL, SWIGLU, OUT_FLOAT, MIN_BLOCKS. Weights: prepack.py.

constexpr int THREADS = ROW_WARPS * 32, N_TILES = TOKENS / 8;
constexpr int CODE_STRIDE = 544, SCALE_STRIDE = 96;  // fragment loads without bank conflicts
constexpr int STAGE_BYTES = 4 * (CODE_STRIDE + SCALE_STRIDE);
constexpr int SET_BYTES = N_TILES * 1024, ROUND_BYTES = ROW_WARPS * SET_BYTES;  // decoded activations of a chunk, a round
static_assert(!RESIDUAL || ROW_WARPS % 2 == 0, "a round of RAC takes two sets for each chunk");

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

struct Operands {
    const u8* w_codes;     // [experts, tiles, KB, 512]
    const u8* w_scales;    // [experts, tiles, KB, 64]
    const float* w_outer;  // [experts] or [experts, 2] (gate, up)
    const u8* x_codes;     // [rows, (KB + S) * 8]
    const u8* x_scales;    // [rows, KB + S]
    const float* x_outer;  // [] or [rows]
    const int* blocks;     // [S] or [experts, S], the K blocks that the residual columns repeat
    void* out;             // [rows out, N] or [rows out, N/2] (SwiGLU)
    const int* slots;      // [blocks of rows * TOKENS], index of an output row, -1 where empty
    const int* groups;     // [blocks of rows], expert of each, -1 past the last
    int n, tiles, k_blocks, extra, outer_per_row, slot_share, list_per_group;  // slot_share: output rows per row of x
};

// Codes and scale of one scale block of each of N_TILES rows, as they wait in registers.
struct Tokens {
    u64 codes[N_TILES];
    u32 scale[N_TILES];
};

// Decoded into B fragments: a lane's 32 bytes of one tile of 8 rows are two runs of 16 for the warp.
__device__ __forceinline__ void store_fragments(u8* to, const Tokens& x, int lane) {
#pragma unroll
    for (int j = 0; j < N_TILES; j++) {
        const u32 low = (u32)x.codes[j], high = (u32)(x.codes[j] >> 32), scale = token_scale(x.scale[j]);
        uint4* at = reinterpret_cast<uint4*>(to + j * 1024 + lane * 16);
        at[0] = make_uint4(multiply(pair_linear<0>(low), scale), multiply(pair_linear<1>(low), scale),
                           multiply(pair_linear<2>(low), scale), multiply(pair_linear<3>(low), scale));
        at[32] = make_uint4(multiply(pair_linear<0>(high), scale), multiply(pair_linear<1>(high), scale),
                            multiply(pair_linear<2>(high), scale), multiply(pair_linear<3>(high), scale));
    }
}

// Codes and scales of one chunk: a lane's block of eight rows.
struct Weights {
    uint4 codes[4];
    uint2 scales;
};

// Decode a chunk of the weight and multiply it by SETS sets of activations.
template <int SETS>
__device__ __forceinline__ void multiply_chunk(float (&acc)[4][N_TILES][4], const Weights& w, const u8* fragments) {
    const u32 scale[4][2] = {{weight_scale<0>(w.scales.x), weight_scale<1>(w.scales.x)},
                             {weight_scale<2>(w.scales.x), weight_scale<3>(w.scales.x)},
                             {weight_scale<0>(w.scales.y), weight_scale<1>(w.scales.y)},
                             {weight_scale<2>(w.scales.y), weight_scale<3>(w.scales.y)}};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 b[SETS][N_TILES];
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int j = 0; j < N_TILES; j++)
                b[set][j] = *reinterpret_cast<const uint4*>(fragments + set * SET_BYTES + j * 1024 + half * 512);
#define STEP(ODD)                                                                                               \
    {                                                                                                           \
        u32 a[4][4];                                                                                            \
        _Pragma("unroll") for (int i = 0; i < 4; i++) {                                                         \
            const u32 low = half ? w.codes[i].y : w.codes[i].x, high = half ? w.codes[i].w : w.codes[i].z;      \
            weight_fragment<(ODD) * 2>(a[i], low, high, scale[i]);                                              \
        }                                                                                                       \
        _Pragma("unroll") for (int set = 0; set < SETS; set++)                                                  \
            _Pragma("unroll") for (int j = 0; j < N_TILES; j++)                                                 \
                _Pragma("unroll") for (int i = 0; i < 4; i++)                                                   \
                    mma(acc[i][j], a[i], (ODD) ? b[set][j].z : b[set][j].x, (ODD) ? b[set][j].w : b[set][j].y); \
    }
        STEP(0) STEP(1)
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) grouped_gemm(const Operands p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ int token_row[TOKENS], out_row[TOKENS];
    __shared__ float outer[TOKENS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int tile = blockIdx.x * ROW_WARPS + warp, chunks = (p.k_blocks + 3) >> 2;
    release_next();
    wait_for_previous();
    const int group = p.groups[blockIdx.y];
    if (group < 0) return;

    u8* ring = memory + 2 * ROUND_BYTES + warp * STAGES * STAGE_BYTES;
    int* order = reinterpret_cast<int*>(memory + 2 * ROUND_BYTES + ROW_WARPS * STAGES * STAGE_BYTES);
    if (threadIdx.x < TOKENS) {
        const int target = p.slots[blockIdx.y * TOKENS + threadIdx.x], row = target < 0 ? -1 : target / p.slot_share;
        out_row[threadIdx.x] = target;
        token_row[threadIdx.x] = row;
        outer[threadIdx.x] = row < 0 ? 0.0f : p.x_outer[p.outer_per_row ? row : 0];
    }
    // Which block stands at each position along K; past the last, a block whose activations count as zeros.
    for (int i = threadIdx.x; i < chunks * 4; i += THREADS) order[i] = i < p.k_blocks ? i : 0;
    if (RESIDUAL) {  // the listed blocks in the list's order, then the others, ascending
        int* listed = order + chunks * 4;
        for (int i = threadIdx.x; i < p.k_blocks; i += THREADS) listed[i] = 0;
        __syncthreads();
        const int* blocks = p.blocks + (size_t)(p.list_per_group ? group : 0) * p.extra;
        for (int i = threadIdx.x; i < p.extra; i += THREADS) order[i] = blocks[i], listed[blocks[i]] = 1;
        __syncthreads();
        if (warp == 0)
            for (int base = 0, at = p.extra; base < p.k_blocks; base += 32) {
                const bool other = base + lane < p.k_blocks && !listed[base + lane];
                const u32 others = __ballot_sync(0xFFFFFFFFu, other);
                if (other) order[at + __popc(others & ((1u << lane) - 1))] = base + lane;
                at += __popc(others);
            }
    }
    __syncthreads();

    const size_t unit = ((size_t)group * p.tiles + min(tile, p.tiles - 1)) * p.k_blocks;
    const u8* w_codes = p.w_codes + unit * 512 + lane * 16;
    const u8* w_scales = p.w_scales + unit * 64 + (lane & 3) * 16;
    u32 codes_to = shared_address(ring) + lane * 16;
    u32 scales_to = shared_address(ring) + 4 * CODE_STRIDE + (lane >> 2) * SCALE_STRIDE + (lane & 3) * 16;
    asm("" : "+l"(w_codes), "+l"(w_scales), "+r"(codes_to), "+r"(scales_to));  // kept, not computed again each time
    auto fetch = [&](int chunk, u32 stage) {  // stage: offset in the ring
        if (chunk < chunks) {
            const int4 blocks = *reinterpret_cast<const int4*>(order + chunk * 4);
            copy16(codes_to + stage, w_codes + (size_t)(u32)blocks.x * 512);
            copy16(codes_to + stage + CODE_STRIDE, w_codes + (size_t)(u32)blocks.y * 512);
            copy16(codes_to + stage + 2 * CODE_STRIDE, w_codes + (size_t)(u32)blocks.z * 512);
            copy16(codes_to + stage + 3 * CODE_STRIDE, w_codes + (size_t)(u32)blocks.w * 512);
            if (lane < 16) copy16(scales_to + stage, w_scales + (size_t)(u32)order[chunk * 4 + (lane >> 2)] * 64);
        }
        commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(s, s * STAGE_BYTES);

    const int width = p.k_blocks + p.extra;
    bool live[N_TILES];
    u32 row_at[N_TILES];  // first block of the row; an empty slot reads row 0 and counts it as zeros
#pragma unroll
    for (int j = 0; j < N_TILES; j++) {
        live[j] = token_row[j * 8 + g] >= 0;
        row_at[j] = (u32)(max(token_row[j * 8 + g], 0) * width);
    }
    const int twice_until = RESIDUAL ? (p.extra + 3) >> 2 : 0;  // chunks with a residual; a round may add one of zeros
    Tokens next;
    auto load_round = [&](int first) {  // what this warp decodes of the round that begins at chunk `first`
        const bool two = RESIDUAL && first < twice_until, repeats = two && (warp & 1);
        const int position = (first + (two ? warp >> 1 : warp)) * 4 + t;
        const bool inside = position < (repeats ? p.extra : p.k_blocks);
        const int column = !inside ? 0 : repeats ? p.k_blocks + position : order[position];
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
            const u32 at = row_at[j] + column;
            next.codes[j] = __ldg(reinterpret_cast<const u64*>(p.x_codes) + at);
            next.scale[j] = inside && live[j] ? __ldg(p.x_scales + at) : 0;
        }
    };
    load_round(0);

    float acc[4][N_TILES][4] = {};
    u32 stage = 0, free_stage = (STAGES - 1) * STAGE_BYTES;  // offsets in the ring
    auto take = [&](int chunk, Weights& w) {  // from the ring, and fetch what takes the place of the chunk before
        wait<STAGES - 2>();
        __syncwarp();
        const u8* at = ring + stage;
#pragma unroll
        for (int i = 0; i < 4; i++)
            w.codes[i] = *reinterpret_cast<const uint4*>(at + t * CODE_STRIDE + i * 128 + g * 16);
        w.scales = *reinterpret_cast<const uint2*>(at + 4 * CODE_STRIDE + t * SCALE_STRIDE + g * 8);
        fetch(chunk + STAGES - 1, free_stage);
        free_stage = stage;
        stage = stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    };
    u8* buffer = memory;
    for (int first = 0; first < chunks;) {
        const bool two = RESIDUAL && first < twice_until;
        const int count = two ? ROW_WARPS / 2 : ROW_WARPS;
        store_fragments(buffer + warp * SET_BYTES, next, lane);
        load_round(first + count);
        __syncthreads();
        const int last = min(first + count, chunks);
        const u8* fragments = buffer + lane * 16;
        Weights w;
        if (two)
            for (int chunk = first; chunk < last; chunk++, fragments += 2 * SET_BYTES)
                take(chunk, w), multiply_chunk<2>(acc, w, fragments);
        else
            for (int chunk = first; chunk < last; chunk++, fragments += SET_BYTES)
                take(chunk, w), multiply_chunk<1>(acc, w, fragments);
        first = last;
        buffer = buffer == memory ? memory + ROUND_BYTES : memory;
    }
    if (tile >= p.tiles) return;

    // Register (i, j, c) is weight row 16 i + 8 (c >> 1) + g of the tile and row 8 j + 2 t + (c & 1) of the block.
    const float w_outer = p.w_outer[SWIGLU ? group * 2 : group], up_outer = SWIGLU ? p.w_outer[group * 2 + 1] : 0.0f;
#pragma unroll
    for (int j = 0; j < N_TILES; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int token = j * 8 + t * 2 + c, target = out_row[token];
            if (target < 0) continue;
            const float alpha = __fmul_rn(outer[token], w_outer), up_alpha = __fmul_rn(outer[token], up_outer);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float low = acc[i][j][c] * UNSCALE, high = acc[i][j][c + 2] * UNSCALE;
                if (SWIGLU) {
                    const int channels = p.n >> 1, channel = tile * 32 + i * 8 + g;
                    if (channel < channels)
                        reinterpret_cast<u16*>(p.out)[(size_t)target * channels + channel] =
                            (u16)to_bf16(swiglu(__fmul_rn(low, alpha), __fmul_rn(high, up_alpha)));
                    continue;
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = tile * 64 + i * 16 + h * 8 + g;
                    const float y = __fmul_rn(h ? high : low, alpha);
                    const size_t at = (size_t)target * p.n + row;
                    if (row >= p.n) continue;
                    if (OUT_FLOAT) reinterpret_cast<float*>(p.out)[at] = y;
                    else reinterpret_cast<u16*>(p.out)[at] = (u16)to_bf16(y);
                }
            }
        }
}
