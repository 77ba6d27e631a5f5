/* The loops of saves and restores, compiled ahead of time, for little-endian processors.

   Contracts are those of the functions in numpy_loops.py, against which tests hold these. Callers check all sizes.
   After a change: make byte-loops. */

#ifdef __AVX2__
#include <immintrin.h>
#endif
#include <stddef.h>
#include <stdint.h>

/* At any address, and of memory that has another type. */
typedef uint8_t word8;
typedef uint16_t word16 __attribute__((aligned(1), may_alias));
typedef uint32_t word32 __attribute__((aligned(1), may_alias));
typedef uint64_t word64 __attribute__((aligned(1), may_alias));
typedef const uint8_t *restrict plane;

const char source_digest[] = SOURCE_DIGEST;

#define ROTATED(BITS, t) (uint##BITS##_t)((t) >> 1 | (t) << (BITS - 1))

typedef uint8_t *restrict out_plane;

/* Rotated left by `r` bits: one, or none. */
#define LEFT(BITS, t, r) (uint##BITS##_t)((t) << (r) | (t) >> ((BITS - (r)) % BITS))

void split16(const word16 *restrict words, size_t count, int rotate, uint8_t *const *planes) {
    out_plane a = planes[0], b = planes[1];
    unsigned r = rotate != 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t t = LEFT(16, words[i], r);
        a[i] = (uint8_t)t, b[i] = (uint8_t)(t >> 8);
    }
}

void split32(const word32 *restrict words, size_t count, int rotate, uint8_t *const *planes) {
    out_plane a = planes[0], b = planes[1], c = planes[2], d = planes[3];
    unsigned r = rotate != 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t t = LEFT(32, words[i], r);
        a[i] = (uint8_t)t, b[i] = (uint8_t)(t >> 8), c[i] = (uint8_t)(t >> 16), d[i] = (uint8_t)(t >> 24);
    }
}

void split64(const word64 *restrict words, size_t count, int rotate, uint8_t *const *planes) {
    out_plane a = planes[0], b = planes[1], c = planes[2], d = planes[3], e = planes[4], f = planes[5], g = planes[6], h = planes[7];
    unsigned r = rotate != 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t t = LEFT(64, words[i], r);
        a[i] = (uint8_t)t, b[i] = (uint8_t)(t >> 8), c[i] = (uint8_t)(t >> 16), d[i] = (uint8_t)(t >> 24);
        e[i] = (uint8_t)(t >> 32), f[i] = (uint8_t)(t >> 40), g[i] = (uint8_t)(t >> 48), h[i] = (uint8_t)(t >> 56);
    }
}

void join16(const uint8_t *const *planes, size_t count, int rotated, word16 *restrict words) {
    plane a = planes[0], b = planes[1];
    if (rotated)
        for (size_t i = 0; i < count; i++) {
            uint16_t t = (uint16_t)(a[i] | b[i] << 8);
            words[i] = ROTATED(16, t);
        }
    else
        for (size_t i = 0; i < count; i++) words[i] = (uint16_t)(a[i] | b[i] << 8);
}

void join32(const uint8_t *const *planes, size_t count, int rotated, word32 *restrict words) {
    plane a = planes[0], b = planes[1], c = planes[2], d = planes[3];
    if (rotated)
        for (size_t i = 0; i < count; i++) {
            uint32_t t = a[i] | (uint32_t)b[i] << 8 | (uint32_t)c[i] << 16 | (uint32_t)d[i] << 24;
            words[i] = ROTATED(32, t);
        }
    else
        for (size_t i = 0; i < count; i++) words[i] = a[i] | (uint32_t)b[i] << 8 | (uint32_t)c[i] << 16 | (uint32_t)d[i] << 24;
}

void join64(const uint8_t *const *planes, size_t count, int rotated, word64 *restrict words) {
    for (size_t i = 0; i < count; i++) {
        uint64_t t = 0;
        for (int p = 0; p < 8; p++) t |= (uint64_t)planes[p][i] << 8 * p;
        words[i] = rotated ? ROTATED(64, t) : t;
    }
}

/* `out` may be `base`. */
#define SUBTRACT(BITS)                                                                      \
    void subtract##BITS(const word##BITS *words, const word##BITS *base, word##BITS *out, size_t count) { \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {                           \
            uint##BITS##_t t = (uint##BITS##_t)(words[i] - base[i]), sign = (uint##BITS##_t)(0 - (t >> (BITS - 1))); \
            out[i] = (uint##BITS##_t)((uint##BITS##_t)(t << 1) ^ sign);                     \
        }                                                                                   \
    }
SUBTRACT(8)
SUBTRACT(16)
SUBTRACT(32)
SUBTRACT(64)

#define ADD(BITS)                                                                           \
    void add##BITS(word##BITS *restrict words, const word##BITS *restrict base, size_t count) { \
        for (size_t i = 0; i < count; i++) {                                                \
            uint##BITS##_t t = words[i], sign = (uint##BITS##_t)(0 - (t & 1));              \
            words[i] = (uint##BITS##_t)(base[i] + (uint##BITS##_t)((uint##BITS##_t)(t >> 1) ^ sign)); \
        }                                                                                   \
    }
ADD(8)
ADD(16)
ADD(32)
ADD(64)

/* The upper 7 bits of 8 bytes as 56 bits, the first byte's highest: each step halves the lanes. */
static uint64_t dense7(uint64_t x) {
    x = __builtin_bswap64(x) >> 1 & 0x7f7f7f7f7f7f7f7f;
    x = (x & 0x7f007f007f007f00) >> 1 | (x & 0x007f007f007f007f);
    x = (x & 0x3fff00003fff0000) >> 2 | (x & 0x00003fff00003fff);
    return (x & 0x0fffffff00000000) >> 4 | (x & 0x000000000fffffff);
}

/* 7 bytes from each 8 of a plane. All stores but the last write a byte that the next one replaces. */
void pack7(const uint8_t *restrict plane_, uint8_t *restrict packed, size_t groups) {
    if (!groups) return;
    const word64 *words = (const word64 *)plane_;
    for (size_t j = 0; j < groups - 1; j++) *(word64 *)(packed + 7 * j) = __builtin_bswap64(dense7(words[j]) << 8);
    uint64_t x = dense7(words[groups - 1]);
    for (int t = 0; t < 7; t++) packed[7 * (groups - 1) + t] = (uint8_t)(x >> (48 - 8 * t));
}

/* 8 bytes of a plane from the 56 bits of `x`, most significant first: each step doubles the lanes. */
static uint64_t lanes7(uint64_t x) {
    x = (x & 0x00fffffff0000000) << 4 | (x & 0x000000000fffffff);
    x = (x & 0x0fffc0000fffc000) << 2 | (x & 0x00003fff00003fff);
    x = (x & 0x3f803f803f803f80) << 1 | (x & 0x007f007f007f007f);
    return __builtin_bswap64(x << 1);
}

/* 8 bytes of a plane from each 7. All loads but the last take a byte of the next group, too. */
void unpack7(const uint8_t *restrict packed, uint8_t *restrict plane_, size_t groups) {
    if (!groups) return;
    word64 *words = (word64 *)plane_;
    for (size_t j = 0; j < groups - 1; j++) words[j] = lanes7(__builtin_bswap64(*(const word64 *)(packed + 7 * j)) >> 8);
    uint64_t x = 0;
    for (int t = 0; t < 7; t++) x = x << 8 | packed[7 * (groups - 1) + t];
    words[groups - 1] = lanes7(x);
}

/* The sum of words[i] * keys[i] modulo 2**64, or of words with their halves exchanged. */
static inline __attribute__((always_inline)) uint64_t product_sum(
    const word32 *restrict words, const uint64_t *restrict keys, size_t count, int exchange
) {
    uint64_t sum = 0;
    size_t i = 0;
#ifdef __AVX2__
    const __m256i halves = _mm256_set_epi8(
        -1, -1, -1, -1, 9, 8, 11, 10, -1, -1, -1, -1, 1, 0, 3, 2, -1, -1, -1, -1, 9, 8, 11, 10, -1, -1, -1, -1, 1, 0, 3, 2
    );
    __m256i low = _mm256_setzero_si256(), high = low; /* products of the halves of the keys: AVX2 multiplies 32 by 32 bits */
    for (; i + 4 <= count; i += 4) {
        __m256i word = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(words + i)));
        __m256i key = _mm256_loadu_si256((const __m256i *)(keys + i));
        if (exchange) word = _mm256_shuffle_epi8(word, halves);
        low = _mm256_add_epi64(low, _mm256_mul_epu32(word, key));
        high = _mm256_add_epi64(high, _mm256_mul_epu32(word, _mm256_srli_epi64(key, 32)));
    }
    low = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    for (int lane = 0; lane < 4; lane++) sum += ((word64 *)&low)[lane];
#endif
    for (; i < count; i++) sum += (exchange ? words[i] >> 16 | words[i] << 16 : words[i]) * keys[i];
    return sum;
}

/* For each block of words the sum of their products with the keys. */
void weighted_sums(const word32 *restrict words, size_t count, const uint64_t *restrict keys, size_t block, uint64_t *restrict sums) {
    if (!count) sums[0] = 0;
    for (size_t start = 0, b = 0; start < count; start += block, b++)
        sums[b] = product_sum(words + start, keys, count - start < block ? count - start : block, 0);
}

#define TILE 512
#define TOGETHER 8

/* As weighted_sums, with each of three rows of keys into the same row of sums; the third row is of words with their halves
   exchanged. A few blocks take turns with the same keys, which stay in the processor's first cache. */
void weighted_sum_triples(
    const word32 *restrict words, size_t count, const uint64_t *restrict keys, size_t block, uint64_t *restrict sums, size_t blocks
) {
    for (size_t i = 0; i < 3 * blocks; i++) sums[i] = 0;
    for (size_t first = 0; first < blocks; first += TOGETHER) {
        size_t last = blocks - first < TOGETHER ? blocks : first + TOGETHER;
        for (size_t tile = 0; tile < block; tile += TILE) {
            for (size_t b = first; b < last; b++) {
                size_t start = b * block + tile, end = (b + 1) * block;
                if (end > count) end = count;
                if (end > start + TILE) end = start + TILE;
                if (start >= end) break;
                for (int row = 0; row < 2; row++)
                    sums[row * blocks + b] += product_sum(words + start, keys + row * block + tile, end - start, 0);
                sums[2 * blocks + b] += product_sum(words + start, keys + 2 * block + tile, end - start, 1);
            }
        }
    }
}

/* Copies bytes with stores that do not load the target into the caches. Others see them when it has returned. */
void copy_streaming(const word8 *restrict source, size_t size, word8 *restrict target) {
    const size_t step = 32;
    size_t head = -(uintptr_t)target % step, i = 0;
    volatile word8 *bytes = target; /* one at a time: else the compiler calls memcpy */
    for (; i < size && i < head; i++) bytes[i] = source[i];
#ifdef __AVX2__
    for (; i + 2 * step <= size; i += 2 * step) {
        const __m256i *from = (const __m256i *)(source + i);
        __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        _mm_prefetch((const char *)from + 1024, _MM_HINT_NTA); /* beyond the end, too: it never faults */
        _mm256_stream_si256((__m256i *)(target + i), a);
        _mm256_stream_si256((__m256i *)(target + i) + 1, b);
    }
    _mm_sfence();
#else
    for (; i + step <= size; i += step)
        __asm__ volatile("ldp q0, q1, [%0]\n\tstnp q0, q1, [%1]" : : "r"(source + i), "r"(target + i) : "v0", "v1", "memory");
    __asm__ volatile("dmb ishst" : : : "memory");
#endif
    for (; i < size; i++) bytes[i] = source[i];
}

/* A function of the zstd library: it returns a size, or an error code beyond all sizes. */
typedef size_t zstd_call(void *context, void *target, size_t room, const void *source, size_t size);

/* Fills `sizes` with those of the frames of `stream` bytes of the plane each. Returns 0 or an error code. */
size_t zstd_encode(
    zstd_call *one, void *context, const uint8_t *plane_, size_t total, size_t stream, uint8_t *coded, size_t room, uint64_t *sizes
) {
    for (size_t at = 0, i = 0; at < total; at += stream, i++) {
        size_t got = one(context, coded, room, plane_ + at, total - at < stream ? total - at : stream);
        if (got > room) return got;
        sizes[i] = got;
        coded += got;
        room -= got;
    }
    return 0;
}

/* Bytes of `plane_` decoded until all were or a frame had the wrong size, or an error code. The frames' sizes add up to those of
   `coded`. */
size_t zstd_decode(
    zstd_call *one, void *context, const uint8_t *coded, const uint64_t *sizes, size_t count, size_t stream, uint8_t *plane_, size_t total
) {
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        size_t room = total - at < stream ? total - at : stream;
        size_t got = one(context, plane_ + at, room, coded, sizes[i]);
        if (got != room) return got > total ? got : at;
        at += room;
        coded += sizes[i];
    }
    return at;
}
