// Shared by the CUDA C++ kernels: E2M1 codes and their block scales to bf16 pairs by integer operations, the tensor-core
// fragment of a prepacked weight, asynchronous copies, and the order of launches.
//
// A code is placed as a bf16 of value * 2^-126 (E2M1's subnormal lands on bf16's), a scale as scale * 2^107, and the
// product, value * 2^-19, is exact: it has six significant bits.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr float UNSCALE = 274877906944.0f;  // 2^38, for a product of two operands decoded so

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// Codes P and P + 4 of a linear word as bf16x2 * 2^-126: sign to bit 15, exponent and mantissa to bits 8..6.
template <int P>
__device__ __forceinline__ u32 pair_linear(u32 w) {
    const u32 magnitude = P == 0 ? w << 6 : P == 1 ? w << 2 : P == 2 ? w >> 2 : w >> 6;
    const u32 sign = P == 0 ? w << 12 : P == 1 ? w << 8 : P == 2 ? w << 4 : w;
    return (magnitude & 0x01C001C0u) | (sign & 0x80008000u);
}
// The same of a prepacked word, whose bits lie so that codes 0 and 1 need no second shift. In each half:
// code 0 sign 15, magnitude 8..6; code 1 sign 12, 5..3; code 2 sign 14, 2..0; code 3 sign 13, 11..9.
template <int P>
__device__ __forceinline__ u32 pair_packed(u32 w) {
    if (P == 0) return w & 0x81C081C0u;
    if (P == 1) return (w << 3) & 0x81C081C0u;
    const u32 magnitude = P == 2 ? w << 6 : w >> 3;
    const u32 sign = P == 2 ? w << 1 : w << 2;
    return (magnitude & 0x01C001C0u) | (sign & 0x80008000u);
}
// Byte `INDEX` of w, an E5M3 scale, as bf16x2 of scale * 2^107.
template <int INDEX>
__device__ __forceinline__ u32 weight_scale(u32 w) {
    return __byte_perm(w, 0, INDEX | 0x4040 | (INDEX << 8)) * 16u + 0x70007000u;
}
// A operand of m16n8k16 from codes P, P + 1, P + 4, P + 5 of two rows, eight apart, and their scales.
template <int P>
__device__ __forceinline__ void weight_fragment(u32 (&a)[4], u32 low, u32 high, const u32 (&scale)[2]) {
    a[0] = multiply(pair_packed<P>(low), scale[0]), a[1] = multiply(pair_packed<P>(high), scale[1]);
    a[2] = multiply(pair_packed<P + 1>(low), scale[0]), a[3] = multiply(pair_packed<P + 1>(high), scale[1]);
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// E4M3 byte as bf16x2 of scale * 2^107; the sign bit is ignored, 0x7F is NaN.
__device__ __forceinline__ u32 token_scale(u32 byte) {
    const u32 magnitude = byte & 0x7Fu;
    float s = __uint_as_float(magnitude << 20) * 1.329227995784916e36f * 1.6225927682921336e32f;  // 2^120, 2^107
    s = magnitude == 0x7Fu ? __uint_as_float(0x7FC00000u) : s;
    return __byte_perm(__float_as_uint(s), 0, 0x3232);
}
// A float as bf16 bits, to nearest even.
__device__ __forceinline__ u32 to_bf16(float v) {
    u32 d;
    asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b32 %0, {h, 0};}" : "=r"(d) : "f"(v));
    return d;
}
// bf16(gate) and bf16(up) to silu(gate) * up in FP32, silu(v) = v / (1 + exp(-v)).
__device__ __forceinline__ float swiglu(float gate, float up) {
    const float g = __uint_as_float(to_bf16(gate) << 16), u = __uint_as_float(to_bf16(up) << 16);
    return __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, expf(-g))), u);
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Copies to shared memory come in groups: end one, wait until no more than PENDING are on their way.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
// Let the next kernel start, and wait for the one before this: nothing but weights may be touched before it.
__device__ __forceinline__ void release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
