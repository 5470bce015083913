// W4A4 product for some tens of tokens on Hopper: y[token][row] = sum_k W[row][k] X[token][k].
//
// As decode.cu, with wgmma and the activations shared: the weight is decoded in registers, as the A operand of wgmma
// m64nTOKENSk16, the activations into shared memory, as its B operand, once for all rows of the thread block.
// A thread block owns 64 * ROW_TILES * ROW_GROUPS weight rows and TOKENS tokens. Each row group is one warpgroup;
// the row groups share the decoded activations, and K_GROUPS such sets share K by steps of 128. A step is two chunks
// of four scale blocks, one block for each of the four lanes of a quad, so that a lane needs one scale per row and
// chunk. A warp copies its part of a step by whole 128-byte lines.
//
// RAC: the residual has its own B operand and meets the decoded weight while it is in registers.
//
// Compiled by NVRTC with -D: TOKENS, ROW_TILES, ROW_GROUPS, K_GROUPS, STAGES, RESIDUAL, OUT_FLOAT; the functions
// `wgmma` and `wgmma_operands` are generated for TOKENS (wide.py). Weight layout: see prepack.py.

constexpr int GROUP_THREADS = ROW_GROUPS * 128, THREADS = K_GROUPS * GROUP_THREADS, TILES = ROW_GROUPS * ROW_TILES,
              ROWS = TILES * 64;
constexpr int SETS = RESIDUAL ? 2 : 1;  // activation sets: main, residual
constexpr int BLOCK_STRIDE = 160;       // 128 bytes of codes, padded so that fragment loads have no bank conflicts
constexpr int TILE_BYTES = 4 * 8 * BLOCK_STRIDE + 512;  // one tile and step: four warps' codes, and the scales
constexpr int STAGE_BYTES = ROW_TILES * TILE_BYTES;      // of one row group
constexpr int ATOM_BYTES = TOKENS * 128, SET_BYTES = 2 * ATOM_BYTES, BUFFER_BYTES = SETS * SET_BYTES;
constexpr int UNITS = (TOKENS * 8 + GROUP_THREADS - 1) / GROUP_THREADS;  // activation blocks a thread decodes in a step
constexpr int SUM_STRIDE = ROWS + 4;

__device__ __forceinline__ void copy16(u32 to, const void* from, bool keep) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(keep ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void group_barrier(int k_group) {
    asm volatile("bar.sync %0, %1;" ::"r"(k_group + 1), "n"(GROUP_THREADS) : "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

struct Operands {
    const u8* w_codes;     // [tiles, KB, 512]
    const u8* w_scales;    // [tiles, KB, 64]
    const float* w_outer;  // []
    const u8* x_codes;     // [rows, (KB + S) * 8]
    const u8* x_scales;    // [rows, KB + S]
    const float* x_outer;  // [] or [rows]
    const int* blocks;     // [S], the K blocks that the residual columns repeat
    void* out;             // [rows, N]
    float* partial;        // [splits, output tiles, TOKENS * ROWS] where the grid splits K
    int* arrivals;         // [output tiles], zero between launches
    int rows, n, tiles, k_blocks, extra, outer_per_row;
};

// Decoded weights of one chunk: four k16 fragments.
__device__ __forceinline__ void decode_chunk(u32 (&a)[4][4], const u8* codes_at, const u8* scales_at) {
    const uint4 words = *reinterpret_cast<const uint4*>(codes_at);
    const u32 scales = *reinterpret_cast<const u16*>(scales_at);
    const u32 scale[2] = {weight_scale<0>(scales), weight_scale<1>(scales)};
    weight_fragment<0>(a[0], words.x, words.z, scale);
    weight_fragment<2>(a[1], words.x, words.z, scale);
    weight_fragment<0>(a[2], words.y, words.w, scale);
    weight_fragment<2>(a[3], words.y, words.w, scale);
}

// One block of one token: 16 decoded values to their places in the swizzled rows. Lanes of the second atom take their
// words in the other order, so that the stores of a warp fall into different banks.
__device__ __forceinline__ void store_block(u8* buffer, u64 codes, u32 scale_byte, int token, int block) {
    const int atom = block >> 2, t = block & 3;
    const u32 scale = token_scale(scale_byte);
    const u32 first = atom ? (u32)(codes >> 32) : (u32)codes, second = atom ? (u32)codes : (u32)(codes >> 32);
    u8* row = buffer + atom * ATOM_BYTES + token * 128 + t * 4;
    const int flip = (token & 7) ^ (atom << 2);
#define STORE(CHUNK, VALUE) *reinterpret_cast<u32*>(row + (((CHUNK) ^ flip) << 4)) = multiply(VALUE, scale)
    STORE(0, pair_linear<0>(first));
    STORE(1, pair_linear<1>(first));
    STORE(2, pair_linear<2>(first));
    STORE(3, pair_linear<3>(first));
    STORE(4, pair_linear<0>(second));
    STORE(5, pair_linear<1>(second));
    STORE(6, pair_linear<2>(second));
    STORE(7, pair_linear<3>(second));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) wide_gemm(const Operands p) {
    extern __shared__ u8 unaligned[];
    __shared__ int token_row[TOKENS];
    __shared__ float outer[TOKENS];
    __shared__ bool last;
    release_next();
    u8* memory = unaligned + (-shared_address(unaligned) & 1023);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, part = warp & 3;
    const int k_group = threadIdx.x / GROUP_THREADS, member = threadIdx.x % GROUP_THREADS, row_group = member >> 7;
    const int split = blockIdx.z, splits = gridDim.z, first_tile = blockIdx.x * TILES + row_group * ROW_TILES;
    const int all_steps = (p.k_blocks + 7) >> 3, slices = K_GROUPS * splits, slice = split * K_GROUPS + k_group;
    const int steps = slice < all_steps ? (all_steps - 1 - slice) / slices + 1 : 0;

    u8* buffers = memory + k_group * 3 * BUFFER_BYTES;
    u8* ring = memory + K_GROUPS * 3 * BUFFER_BYTES + (k_group * ROW_GROUPS + row_group) * STAGES * STAGE_BYTES;
    short* position =
        reinterpret_cast<short*>(memory + K_GROUPS * (3 * BUFFER_BYTES + ROW_GROUPS * STAGES * STAGE_BYTES));
    const u8* w_codes = p.w_codes + (size_t)first_tile * p.k_blocks * 512 + part * 128 + (lane & 7) * 16;
    const u8* w_scales = p.w_scales + (size_t)first_tile * p.k_blocks * 64 + (lane & 3) * 16;
    const u32 ring_at = shared_address(ring) + part * 8 * BLOCK_STRIDE + (lane >> 3) * BLOCK_STRIDE + (lane & 7) * 16;
    auto fetch = [&](int index, int stage) {
        if (index < steps) {
            const int first = (index * slices + slice) * 8;
            const u32 to = ring_at + stage * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                const bool owned = first_tile + i < p.tiles;
                const size_t from_tile = owned ? (size_t)i * p.k_blocks : 0;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int from = first + half * 4 + (lane >> 3);
                    const bool keep = owned && from < p.k_blocks;
                    copy16(to + i * TILE_BYTES + half * 4 * BLOCK_STRIDE, w_codes + (keep ? from_tile + from : 0) * 512, keep);
                }
                const int from = first + part * 2 + (lane >> 2);
                const bool keep = owned && from < p.k_blocks;
                if (lane < 8)
                    copy16(shared_address(ring) + stage * STAGE_BYTES + i * TILE_BYTES + 32 * BLOCK_STRIDE + part * 128 +
                               lane * 16,
                           w_scales + (keep ? from_tile + from : 0) * 64, keep);
            }
        }
        commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(s, s);  // nothing of the weight depends on what follows
    wait_for_previous();

    if (threadIdx.x < TOKENS) {
        const int row = blockIdx.y * TOKENS + threadIdx.x;
        token_row[threadIdx.x] = row < p.rows ? row : -1;
        outer[threadIdx.x] = row < p.rows ? p.x_outer[p.outer_per_row ? row : 0] : 0.0f;
    }
    if (RESIDUAL) {
        for (int i = threadIdx.x; i < all_steps * 8; i += THREADS) position[i] = -1;
        __syncthreads();
        for (int i = threadIdx.x; i < p.extra; i += THREADS) position[p.blocks[i]] = (short)i;
    }
    const float w_outer = p.w_outer[0];
    __syncthreads();

    // Activations of the next step wait in registers: one block (8 bytes of codes, one scale) a unit.
    const int width = p.k_blocks + p.extra;
    u64 codes[SETS][UNITS];
    u32 scales[SETS][UNITS];
    size_t unit_row[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int unit = u * GROUP_THREADS + member, row = unit < TOKENS * 8 ? token_row[unit >> 3] : -1;
        unit_row[u] = row < 0 ? ~(size_t)0 : (size_t)row * width;
    }
    auto load_tokens = [&](int index) {
        const int block = (index * slices + slice) * 8 + (member & 7);
        const bool inside = index < steps && block < p.k_blocks;
        const int extra = RESIDUAL && inside ? position[block] : -1;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const bool keep = inside && unit_row[u] != ~(size_t)0;
            const u64* from = reinterpret_cast<const u64*>(p.x_codes) + unit_row[u];
            const u8* scale_from = p.x_scales + unit_row[u];
            codes[0][u] = keep ? __ldg(from + block) : 0;
            scales[0][u] = keep ? __ldg(scale_from + block) : 0;
            if (RESIDUAL) {
                const bool repeated = keep && extra >= 0;
                codes[SETS - 1][u] = repeated ? __ldg(from + p.k_blocks + extra) : 0;
                scales[SETS - 1][u] = repeated ? __ldg(scale_from + p.k_blocks + extra) : 0;
            }
        }
    };
    load_tokens(0);

    float acc[ROW_TILES][TOKENS / 2] = {};
    u32 a[2][4][4];
    int stage = 0, turn = 0;
    for (int index = 0; index < steps; index++) {
        u8* buffer = buffers + turn * BUFFER_BYTES;
        turn = turn == 2 ? 0 : turn + 1;
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const int unit = u * GROUP_THREADS + member;
                if (UNITS * GROUP_THREADS == TOKENS * 8 || unit < TOKENS * 8)
                    store_block(buffer + set * SET_BYTES, codes[set][u], scales[set][u], unit >> 3, unit & 7);
            }
        load_tokens(index + 1);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        wait<STAGES - 2>();
        group_barrier(k_group);
        fetch(index + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);

        const u8* at = ring + stage * STAGE_BYTES;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        const u8* codes_at = at + part * 8 * BLOCK_STRIDE + t * BLOCK_STRIDE + g * 16;
        const u8* scales_at = at + 32 * BLOCK_STRIDE + t * 64 + g * 8 + part * 2;
        // Rows of 128 bytes, swizzled; 8-row groups 1024 bytes apart. A k16 step is 32 bytes further.
        const u64 layout = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((shared_address(buffer) & 0x3FFFFu) >> 4);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                const int set_of_registers = (half * ROW_TILES + i) & 1;
                u32(&fragment)[4][4] = a[set_of_registers];
                decode_chunk(fragment, codes_at + i * TILE_BYTES + half * 4 * BLOCK_STRIDE,
                             scales_at + i * TILE_BYTES + half * 256);
                wgmma_operands(acc[i], fragment);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int m = 0; m < 4; m++) wgmma(acc[i], fragment[m], layout + half * (ATOM_BYTES >> 4) + m * 2);
                if (RESIDUAL)
#pragma unroll
                    for (int m = 0; m < 4; m++)
                        wgmma(acc[i], fragment[m], layout + ((SET_BYTES + half * ATOM_BYTES) >> 4) + m * 2);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                wgmma_wait<1>();
                wgmma_operands(acc[i], a[set_of_registers ^ 1]);
            }
    }

    // Sum over the K groups, in ascending order, then over the grid's splits, in ascending order.
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) wgmma_operands(acc[i], a[0]);
    wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < TOKENS / 2; j++)
            sums[(k_group * TOKENS + (j >> 2) * 8 + t * 2 + (j & 1)) * SUM_STRIDE + (row_group * ROW_TILES + i) * 64 +
                 part * 16 + ((j >> 1) & 1) * 8 + g] = acc[i][j];
    __syncthreads();
    auto sum_at = [&](int e) { return sums + e / ROWS * SUM_STRIDE + e % ROWS; };
    if (K_GROUPS > 1) {
        for (int e = threadIdx.x; e < TOKENS * ROWS; e += THREADS) {
            float total = *sum_at(e);
#pragma unroll
            for (int k = 1; k < K_GROUPS; k++) total = __fadd_rn(total, sum_at(e)[k * TOKENS * SUM_STRIDE]);
            *sum_at(e) = total;
        }
    }
    if (splits > 1) {
        const size_t output_tile = (size_t)blockIdx.y * gridDim.x + blockIdx.x, all = (size_t)gridDim.y * gridDim.x;
        float4* partial = reinterpret_cast<float4*>(p.partial);
        constexpr int QUADS = TOKENS * ROWS / 4;
        __syncthreads();
        for (int q = threadIdx.x; q < QUADS; q += THREADS)
            __stcg(partial + (split * all + output_tile) * QUADS + q, *reinterpret_cast<float4*>(sum_at(q * 4)));
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last = atomicAdd(p.arrivals + output_tile, 1) == splits - 1;
        __syncthreads();
        if (!last) return;
        if (threadIdx.x == 0) p.arrivals[output_tile] = 0;
        __threadfence();
#pragma unroll 4
        for (int q = threadIdx.x; q < QUADS; q += THREADS) {
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
    for (int e = threadIdx.x; e < TOKENS * ROWS; e += THREADS) {
        const int token = e / ROWS, row = first_row + e % ROWS;
        if (token_row[token] < 0 || row >= p.n) continue;
        const float y = __fmul_rn(*sum_at(e) * UNSCALE, __fmul_rn(outer[token], w_outer));
        const size_t at = (size_t)token_row[token] * p.n + row;
        if (OUT_FLOAT) reinterpret_cast<float*>(p.out)[at] = y;
        else reinterpret_cast<u16*>(p.out)[at] = (u16)to_bf16(y);
    }
}
