// The NVFP4 chain of mma.chain for a CPU: every step truncates every term. Compiled on first use by chain_cpu.py.
//
// Per output and step of 64: four sums of 16 products (small integers, exact in int16: |p| <= 16 * 12 * 12), times the
// scales (exact in double), truncated toward zero to multiples of 2^(top - F), added to the truncated C, and the sum
// cut to 24 bits. As in fdpa.py all doubles are exact. Loops run over columns, so that the compiler vectorises them.
// A zero scale has exponent -6, so its group's is at most 2; whether it counts in top cannot show, C being zero at first:
// every term is a multiple of 2^-20.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kColumns = 64;        // of a block: its part of B stays in the cache
constexpr int64_t kOut = -100000;  // added to the exponent of a term that does not count in top

double power_of_two(int64_t exponent) {
  int64_t bits = (exponent + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

int64_t bits_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, 8);
  return bits;
}

double of_bits(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

struct Problem {
  const int16_t* a;        // twice the FP4 values [M][K]
  const int16_t* b;        // twice the FP4 values [K][N]
  const double* scale_a;   // [M][K / 16], NaN kept
  const double* scale_b;   // [K / 16][N]
  const int64_t* top_a;    // exponents of the scales
  const int64_t* top_b;
  int32_t* out;            // [M][N]
  int64_t m, n, k, fraction_bits, zero, dead_counts, cancelled_counts, nan;
};

// Whether some pair of the group is non-zero in both operands.
bool live(const Problem& p, int64_t row, int64_t group, int64_t column) {
  for (int64_t i = group * 16; i < group * 16 + 16; ++i)
    if (p.a[row * p.k + i] != 0 && p.b[i * p.n + column] != 0) return true;
  return false;
}

// Four times the sum of the group's products, and what is added to its exponent, for `width` columns.
void group_sums(const Problem& p, int64_t row, int64_t group, int64_t first, int width, int16_t* sums, int64_t* shift) {
  std::fill(sums, sums + kColumns, int16_t{0});
  for (int64_t i = group * 16; i < group * 16 + 16; ++i) {
    const int16_t value = p.a[row * p.k + i];
    const int16_t* other = p.b + i * p.n + first;
    for (int j = 0; j < width; ++j) sums[j] = static_cast<int16_t>(sums[j] + value * other[j]);
  }
  for (int j = 0; j < width; ++j) shift[j] = 0;
  for (int j = 0; j < width; ++j) {
    if (sums[j] != 0) continue;
    const bool counts = live(p, row, group, first + j) ? p.cancelled_counts : p.dead_counts;
    shift[j] = counts ? 0 : kOut;
  }
}

void block(const Problem& p, int64_t row, int64_t first, int width) {
  alignas(64) int16_t sums[4][kColumns];
  alignas(64) int64_t shift[4][kColumns];
  alignas(64) double acc[kColumns] = {};
  const int64_t groups = p.k / 16;
  for (int64_t g = 0; g < groups; g += 4) {
    for (int q = 0; q < 4; ++q) group_sums(p, row, g + q, first, width, sums[q], shift[q]);
    const double* sa = p.scale_a + row * groups + g;
    const int64_t* ta = p.top_a + row * groups + g;
    const double* sb = p.scale_b + g * p.n + first;
    const int64_t* tb = p.top_b + g * p.n + first;
    for (int j = 0; j < width; ++j) {
      int64_t top = acc[j] == 0 ? p.zero : ((bits_of(acc[j]) >> 52) & 0x7FF) - 1023;
      for (int q = 0; q < 4; ++q) top = std::max(top, ta[q] + tb[q * p.n + j] + shift[q][j]);
      const double unit = power_of_two(p.fraction_bits - top);
      double total = std::trunc(acc[j] * unit);
      for (int q = 0; q < 4; ++q) total += std::trunc(0.25 * sums[q][j] * sa[q] * sb[q * p.n + j] * unit);
      acc[j] = of_bits(bits_of(total * power_of_two(top - p.fraction_bits)) & ~((int64_t{1} << 29) - 1));
    }
  }
  for (int j = 0; j < width; ++j) {
    const float result = static_cast<float>(acc[j]);
    int32_t bits;
    std::memcpy(&bits, &result, 4);
    p.out[row * p.n + first + j] = std::isnan(result) ? static_cast<int32_t>(p.nan) : bits;
  }
}

}  // namespace

// Rows [start, stop) of the problem.
extern "C" void run(const Problem* p, int64_t start, int64_t stop) {
  for (int64_t first = 0; first < p->n; first += kColumns)
    for (int64_t row = start; row < stop; ++row)
      block(*p, row, first, static_cast<int>(std::min<int64_t>(kColumns, p->n - first)));
}
