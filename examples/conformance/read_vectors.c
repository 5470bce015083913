/* Golden NVFP4 vectors from C: reads the file that `quads vectors export` writes (docs/conformance-vectors.md), and
 * checks three things with them, as a kernel's own test would: dequantised values bit for bit, the 128x4 scale layout,
 * and the BF16 epilogue. Build: cc -std=c99 -O2 -ffp-contract=off read_vectors.c -o read_vectors */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UINT8 = 1, BFLOAT16 = 2, FLOAT32 = 3, INT32 = 4 };

typedef struct {
    char name[88];
    uint32_t dtype, ndim, dims[4];
    uint64_t offset, bytes;
} Entry; /* 128 bytes, no padding, little-endian */

static unsigned char *file_data;
static Entry *entries;
static uint32_t count;

static void load(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) { perror(path); exit(2); }
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    file_data = malloc((size_t)size);
    if (!file_data || size < 16 || fread(file_data, 1, (size_t)size, file) != (size_t)size ||
        memcmp(file_data, "NVFP4VEC", 8) != 0) {
        fprintf(stderr, "%s: not a vector file\n", path);
        exit(2);
    }
    fclose(file);
    memcpy(&count, file_data + 12, 4);
    entries = (Entry *)(file_data + 16);
}

static const Entry *find(const char *prefix, const char *suffix) {
    char name[88];
    snprintf(name, sizeof name, "%s/%s", prefix, suffix);
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(entries[i].name, name) == 0) return &entries[i];
    fprintf(stderr, "no vector named %s\n", name);
    exit(2);
}

static const void *data(const Entry *e) { return file_data + e->offset; }

static float e2m1(unsigned code) {
    static const float grid[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return (code & 8) ? -grid[code & 7] : grid[code & 7];
}

static float e4m3(unsigned byte) { /* a block scale: never negative, never NaN in these vectors */
    int exponent = (byte >> 3) & 15, mantissa = byte & 7;
    float value = exponent ? 8.0f + (float)mantissa : (float)mantissa;
    int shift = (exponent ? exponent : 1) - 10;
    for (; shift > 0; shift--) value *= 2.0f;
    for (; shift < 0; shift++) value *= 0.5f;
    return value;
}

static uint32_t word(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }

static long check_values(const char *input) { /* fl(fl(code * scale) * outer), float32 words */
    char path[88];
    snprintf(path, sizeof path, "quantize/%s/exact", input);
    const Entry *values = find(path, "values");
    const unsigned char *packed = data(find(path, "packed")), *scales = data(find(path, "scales"));
    const float outer = *(const float *)data(find(path, "outer")), *want = data(values);
    uint32_t rows = values->dims[0], k = values->dims[1];
    long wrong = 0;
    for (uint32_t i = 0; i < rows * k; i++) {
        unsigned code = (packed[i / 2] >> (4 * (i % 2))) & 15; /* even index: low nibble */
        float value = e2m1(code) * e4m3(scales[i / 16]);
        value = value * outer;
        wrong += word(value) != word(want[i]);
    }
    return wrong;
}

static long check_layout(void) { /* offset(m, b) = (m/128 * Bp/4 + b/4) * 512 + m%32 * 16 + m%128/32 * 4 + b%4 */
    const Entry *linear = find("layout", "linear"), *tiled = find("layout", "128x4");
    const unsigned char *from = data(linear), *to = data(tiled);
    uint32_t rows = linear->dims[0], blocks = linear->dims[1], tiles = tiled->dims[1] / 4;
    long wrong = 0;
    for (uint32_t m = 0; m < rows; m++)
        for (uint32_t b = 0; b < blocks; b++) {
            uint32_t at = (m / 128 * tiles + b / 4) * 512 + m % 32 * 16 + m % 128 / 32 * 4 + b % 4;
            wrong += from[m * blocks + b] != to[at];
        }
    return wrong;
}

static long check_epilogue(const char *path) { /* RNE_bf16(fl(alpha * accumulator)), finite */
    const Entry *acc = find(path, "accumulator");
    const float alpha = *(const float *)data(find(path, "alpha")), *words = data(acc);
    const uint16_t *want = data(find(path, "output"));
    long wrong = 0;
    for (uint32_t i = 0; i < acc->dims[0] * acc->dims[1]; i++) {
        uint32_t bits = word(words[i] * alpha);
        bits += 0x7FFF + ((bits >> 16) & 1);
        wrong += (uint16_t)(bits >> 16) != want[i];
    }
    return wrong;
}

int main(int argc, char **argv) {
    if (argc != 2) { fprintf(stderr, "usage: %s vectors.bin\n", argv[0]); return 2; }
    load(argv[1]);
    long wrong = check_values("ties") + check_values("fp32-2.5") + check_values("tails");
    wrong += check_layout() + check_epilogue("gemm/spread-4") + check_epilogue("gemm/spread-15");
    printf("%u vectors, %ld differences\n", count, wrong);
    return wrong != 0;
}
