/* The loops of a restore, compiled ahead of time: importing numba and loading its cached code takes longer than decoding 193 MB.

   Contracts are those of the functions in loops.py and zstd_loops.py, against which tests hold these. Callers check all sizes.
   After a change: make decode-loops. */

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

/* 8 bytes of a plane from each 7. */
void unpack7(const uint8_t *restrict packed, uint8_t *restrict plane_, size_t groups) {
    for (size_t j = 0; j < groups; j++) {
        uint64_t x = 0;
        for (int t = 0; t < 7; t++) x = x << 8 | packed[7 * j + t];
        for (int t = 0; t < 8; t++) plane_[8 * j + t] = (uint8_t)((x >> (49 - 7 * t) & 127) << 1);
    }
}

/* Each product is the sum of those with the lower and the upper half of the key: there are instructions for 32 by 32 bits. */
void weighted_sums(const word32 *restrict words, size_t count, const uint64_t *restrict keys, size_t block, uint64_t *restrict sums) {
    for (size_t start = 0, b = 0; start < count; start += block, b++) {
        size_t size = count - start < block ? count - start : block;
        uint64_t low = 0, high = 0;
        for (size_t i = 0; i < size; i++) {
            uint64_t w = words[start + i];
            low += w * (uint32_t)keys[i];
            high += w * (keys[i] >> 32);
        }
        sums[b] = low + (high << 32);
    }
}

typedef size_t decompress(void *context, void *target, size_t room, const void *source, size_t size);

/* Bytes of `plane_` decoded until all were or a frame had the wrong size, or an error code. The frames' sizes add up to those of
   `coded`. */
size_t zstd_decode(
    decompress *one, void *context, const uint8_t *coded, const uint64_t *sizes, size_t count, size_t stream, uint8_t *plane_, size_t total
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
