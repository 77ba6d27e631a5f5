/* Runs every function of byte_loops.c on pseudorandom bytes, and prints a hash of each result. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef size_t zstd_call(void *context, void *target, size_t room, const void *source, size_t size);

#define LOOPS(BITS)                                                                                     \
    void split##BITS(const void *words, size_t count, int rotate, uint8_t *const *planes);              \
    void join##BITS(const uint8_t *const *planes, size_t count, int rotated, void *words);
LOOPS(16) LOOPS(32) LOOPS(64)
#define DELTAS(BITS)                                                                                    \
    void subtract##BITS(const void *words, const void *base, void *out, size_t count);                  \
    void add##BITS(void *words, const void *base, size_t count);
DELTAS(8) DELTAS(16) DELTAS(32) DELTAS(64)
void pack7(const uint8_t *plane, uint8_t *packed, size_t groups);
void unpack7(const uint8_t *packed, uint8_t *plane, size_t groups);
void weighted_sums(const void *words, size_t count, const uint64_t *keys, size_t block, uint64_t *sums);
void weighted_sum_triples(const void *words, size_t count, const uint64_t *keys, size_t block, uint64_t *sums, size_t blocks);
void copy_streaming(const uint8_t *source, size_t size, uint8_t *target);
size_t zstd_encode(
    zstd_call *one, void *context, const uint8_t *plane, size_t total, size_t stream, uint8_t *coded, size_t room, uint64_t *sizes
);
size_t zstd_decode(
    zstd_call *one, void *context, const uint8_t *coded, const uint64_t *sizes, size_t count, size_t stream, uint8_t *plane, size_t total
);

static uint64_t state = 0x9E3779B97F4A7C15;

/* xorshift64 (Marsaglia 2003) */
static void fill(void *memory, size_t size) {
    for (size_t i = 0; i < size; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        ((uint8_t *)memory)[i] = state >> 32;
    }
}

/* FNV-1a */
static void show(const char *name, size_t count, const void *memory, size_t size) {
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < size; i++) hash = (hash ^ ((const uint8_t *)memory)[i]) * 0x100000001b3;
    printf("%s %zu %016llx\n", name, count, (unsigned long long)hash);
}

/* Stands for a function of zstd: copies, and fails where there is no room. */
static size_t copy(void *context, void *target, size_t room, const void *source, size_t size) {
    (void)context;
    if (size > room) return (size_t)-1;
    memcpy(target, source, size);
    return size;
}

#define RUN(BITS)                                                                                       \
    for (int rotate = 0; rotate < 2; rotate++) {                                                        \
        uint8_t *planes[BITS / 8];                                                                      \
        for (int p = 0; p < BITS / 8; p++) planes[p] = c + p * count;                                   \
        fill(a, count * BITS / 8);                                                                      \
        split##BITS(a, count, rotate, planes);                                                          \
        show("split" #BITS, count, c, count * BITS / 8);                                                \
        fill(c, count * BITS / 8);                                                                      \
        join##BITS((const uint8_t *const *)planes, count, rotate, b);                                   \
        show("join" #BITS, count, b, count * BITS / 8);                                                 \
    }
#define RUN_DELTAS(BITS)                                                                                \
    fill(a, count * BITS / 8), fill(b, count * BITS / 8);                                               \
    subtract##BITS(a, b, c, count);                                                                     \
    show("subtract" #BITS, count, c, count * BITS / 8);                                                 \
    add##BITS(a, b, count);                                                                             \
    show("add" #BITS, count, a, count * BITS / 8);

int main(void) {
    const size_t most = 5000, block = 1024;
    uint8_t *a = malloc(8 * most + 8), *b = malloc(8 * most + 8), *c = malloc(8 * most + 8);
    uint64_t *keys = malloc(3 * block * 8), *sums = malloc(3 * (most / block + 1) * 8);
    const size_t counts[] = {1, 2, 7, 33, 1013, 4096, 4999};
    for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
        size_t count = counts[n], blocks = (count + block - 1) / block;
        RUN(16) RUN(32) RUN(64)
        RUN_DELTAS(8) RUN_DELTAS(16) RUN_DELTAS(32) RUN_DELTAS(64)
        fill(a, 8 * count), pack7(a, b, count), show("pack7", count, b, 7 * count);
        fill(b, 7 * count), unpack7(b, a, count), show("unpack7", count, a, 8 * count);
        fill(a, 4 * count), fill(keys, 3 * block * 8);
        weighted_sums(a, count, keys, block, sums), show("weighted_sums", count, sums, blocks * 8);
        weighted_sum_triples(a, count, keys, block, sums, blocks), show("weighted_sum_triples", count, sums, 3 * blocks * 8);
        memset(c, 0, 2 * count), fill(a, count), copy_streaming(a + 1, count - 1, c + count % 37);
        show("copy_streaming", count, c, 2 * count);
        uint64_t sizes[64];
        size_t frames = (count + 99) / 100, ended[3];
        ended[0] = zstd_encode(copy, 0, a, count, 100, b, count, sizes);
        memset(c, 0, count);
        ended[1] = zstd_decode(copy, 0, b, sizes, frames, 100, c, count);
        sizes[0]--;
        ended[2] = zstd_decode(copy, 0, b, sizes, frames, 100, c, count);
        show("zstd", count, c, count), show("zstd ends", count, ended, sizeof ended);
    }
    return 0;
}
