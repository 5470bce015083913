// One tensor-core instruction per entry point, on raw words, for hopper_words.py (sm_90a).
// A tile: A [M][8], B [8][8], C [M][N32] and D like C, all 32-bit words; 8 words are one K step of every type used here.
#include <cstdint>
#include <cuda_runtime.h>

// B in shared memory without swizzle: core matrices of 8 rows x 16 bytes; the two along K are 128 bytes apart.
__device__ uint64_t descriptor(const uint32_t* shared) {
  uint64_t address = static_cast<uint64_t>(__cvta_generic_to_shared(shared));
  return ((address & 0x3FFFF) >> 4) | (uint64_t{128 >> 4} << 16) | (uint64_t{128 >> 4} << 32);
}

__device__ void load_b(uint32_t* shared, const uint32_t* b) {
  if (threadIdx.x < 64) {
    int row = threadIdx.x / 8, word = threadIdx.x % 8;
    shared[(word / 4) * 32 + row * 4 + word % 4] = b[threadIdx.x];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}

// Fragment of A and, for FP32 results, of C and D: rows r and r + 8, words t and t + 4 (columns 2t, 2t + 1).
#define TILE(M, C_WORDS)                                                                   \
  const int lane = threadIdx.x % 32, r = threadIdx.x / 32 * 16 + lane / 4, t = lane % 4;   \
  const uint32_t* at = a + blockIdx.x * M * 8;                                             \
  const uint32_t* ct = c + blockIdx.x * M * C_WORDS;                                       \
  uint32_t* dt = d + blockIdx.x * M * C_WORDS;                                             \
  uint32_t a0 = at[r * 8 + t], a1 = at[(r + 8) * 8 + t];                                   \
  uint32_t a2 = at[r * 8 + t + 4], a3 = at[(r + 8) * 8 + t + 4];

#define LOAD_F32                                                                           \
  uint32_t d0 = ct[r * 8 + 2 * t], d1 = ct[r * 8 + 2 * t + 1];                             \
  uint32_t d2 = ct[(r + 8) * 8 + 2 * t], d3 = ct[(r + 8) * 8 + 2 * t + 1];
#define STORE_F32                                                                          \
  dt[r * 8 + 2 * t] = d0, dt[r * 8 + 2 * t + 1] = d1;                                      \
  dt[(r + 8) * 8 + 2 * t] = d2, dt[(r + 8) * 8 + 2 * t + 1] = d3;
#define LOAD_F16 uint32_t d0 = ct[r * 4 + t], d1 = ct[(r + 8) * 4 + t];
#define STORE_F16 dt[r * 4 + t] = d0, dt[(r + 8) * 4 + t] = d1;

#define WGMMA_BEGIN asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#define WGMMA_END                                                                          \
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");                           \
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");

#define WGMMA_F32(NAME, TYPES, TAIL)                                                       \
  __global__ void NAME(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d) { \
    __shared__ alignas(128) uint32_t shared[64];                                           \
    load_b(shared, b + blockIdx.x * 64);                                                   \
    TILE(64, 8) LOAD_F32 uint64_t desc = descriptor(shared);                               \
    WGMMA_BEGIN                                                                            \
    asm volatile("wgmma.mma_async.sync.aligned." TYPES                                     \
                 " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1" TAIL ";"                     \
                 : "+r"(d0), "+r"(d1), "+r"(d2), "+r"(d3)                                  \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(desc) : "memory");              \
    WGMMA_END STORE_F32                                                                    \
  }
#define WGMMA_F16(NAME, TYPES, TAIL)                                                       \
  __global__ void NAME(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d) { \
    __shared__ alignas(128) uint32_t shared[64];                                           \
    load_b(shared, b + blockIdx.x * 64);                                                   \
    TILE(64, 4) LOAD_F16 uint64_t desc = descriptor(shared);                               \
    WGMMA_BEGIN                                                                            \
    asm volatile("wgmma.mma_async.sync.aligned." TYPES                                     \
                 " {%0,%1}, {%2,%3,%4,%5}, %6, 1, 1, 1" TAIL ";"                           \
                 : "+r"(d0), "+r"(d1)                                                      \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(desc) : "memory");              \
    WGMMA_END STORE_F16                                                                    \
  }
#define MMA_F32(NAME, TYPES)                                                               \
  __global__ void NAME(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d) { \
    TILE(16, 8) LOAD_F32                                                                   \
    uint32_t b0 = b[blockIdx.x * 64 + lane / 4 * 8 + t], b1 = b[blockIdx.x * 64 + lane / 4 * 8 + t + 4]; \
    asm volatile("mma.sync.aligned." TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+r"(d0), "+r"(d1), "+r"(d2), "+r"(d3)                                  \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                  \
    STORE_F32                                                                              \
  }
#define MMA_F16(NAME, TYPES)                                                               \
  __global__ void NAME(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d) { \
    TILE(16, 4) LOAD_F16                                                                   \
    uint32_t b0 = b[blockIdx.x * 64 + lane / 4 * 8 + t], b1 = b[blockIdx.x * 64 + lane / 4 * 8 + t + 4]; \
    asm volatile("mma.sync.aligned." TYPES " {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"    \
                 : "+r"(d0), "+r"(d1)                                                      \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                  \
    STORE_F16                                                                              \
  }

WGMMA_F32(wgmma_bf16, "m64n8k16.f32.bf16.bf16", ", 0")
WGMMA_F32(wgmma_fp16, "m64n8k16.f32.f16.f16", ", 0")
WGMMA_F32(wgmma_tf32, "m64n8k8.f32.tf32.tf32", "")
WGMMA_F32(wgmma_e4m3, "m64n8k32.f32.e4m3.e4m3", "")
WGMMA_F32(wgmma_e5m2, "m64n8k32.f32.e5m2.e5m2", "")
WGMMA_F16(wgmma_fp16_f16, "m64n8k16.f16.f16.f16", ", 0")
WGMMA_F16(wgmma_e4m3_f16, "m64n8k32.f16.e4m3.e4m3", "")
MMA_F32(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA_F32(mma_fp16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA_F32(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA_F32(mma_e4m3, "m16n8k32.row.col.f32.e4m3.e4m3.f32")
MMA_F32(mma_e5m2, "m16n8k32.row.col.f32.e5m2.e5m2.f32")
MMA_F16(mma_fp16_f16, "m16n8k16.row.col.f16.f16.f16.f16")

#define ENTRY(NAME, THREADS)                                                               \
  extern "C" int run_##NAME(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int tiles) { \
    NAME<<<tiles, THREADS>>>(a, b, c, d);                                                  \
    cudaError_t launched = cudaGetLastError(), finished = cudaDeviceSynchronize();         \
    return launched != cudaSuccess ? launched : finished;                                  \
  }
ENTRY(wgmma_bf16, 128)
ENTRY(wgmma_fp16, 128)
ENTRY(wgmma_tf32, 128)
ENTRY(wgmma_e4m3, 128)
ENTRY(wgmma_e5m2, 128)
ENTRY(wgmma_fp16_f16, 128)
ENTRY(wgmma_e4m3_f16, 128)
ENTRY(mma_bf16, 32)
ENTRY(mma_fp16, 32)
ENTRY(mma_tf32, 32)
ENTRY(mma_e4m3, 32)
ENTRY(mma_e5m2, 32)
ENTRY(mma_fp16_f16, 32)
