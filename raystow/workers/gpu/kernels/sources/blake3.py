"""BLAKE3 of many ranges of device memory at once: ``coding.digest.stored_digest`` of what is stored.

A CPU core hashes 2 to 4 GB/s, and an H200 740 GB/s in a save. Each lane of a program hashes a leaf of 1 KiB; then one program
builds the tree of each object, level by level. The constants, the permutation and the flags are those of the specification
(O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020).
"""

import triton
import triton.language as tl


@triton.jit
def _mix(a, b, c, d, x, y):
    a = a + b + x
    d = d ^ a
    d = (d >> 16) | (d << 16)
    c = c + d
    b = b ^ c
    b = (b >> 12) | (b << 20)
    a = a + b + y
    d = d ^ a
    d = (d >> 8) | (d << 24)
    c = c + d
    b = b ^ c
    b = (b >> 7) | (b << 25)
    return a, b, c, d


@triton.jit
def _initial(LANES: tl.constexpr):
    h0 = tl.full((LANES,), 0x6A09E667, tl.uint32)
    h1 = tl.full((LANES,), 0xBB67AE85, tl.uint32)
    h2 = tl.full((LANES,), 0x3C6EF372, tl.uint32)
    h3 = tl.full((LANES,), 0xA54FF53A, tl.uint32)
    h4 = tl.full((LANES,), 0x510E527F, tl.uint32)
    h5 = tl.full((LANES,), 0x9B05688C, tl.uint32)
    h6 = tl.full((LANES,), 0x1F83D9AB, tl.uint32)
    h7 = tl.full((LANES,), 0x5BE0CD19, tl.uint32)
    return h0, h1, h2, h3, h4, h5, h6, h7


@triton.jit
def _compress(
    h0, h1, h2, h3, h4, h5, h6, h7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
    counter, length, flags, LANES: tl.constexpr,
):  # fmt: skip
    """Return the chaining value after a block of ``length`` bytes."""
    v0, v1, v2, v3, v4, v5, v6, v7 = h0, h1, h2, h3, h4, h5, h6, h7
    v8, v9, v10, v11, _4, _5, _6, _7 = _initial(LANES)
    v12 = tl.zeros((LANES,), tl.uint32) + counter.to(tl.uint32)
    v13 = tl.zeros((LANES,), tl.uint32)
    v14 = tl.zeros((LANES,), tl.uint32) + length.to(tl.uint32)
    v15 = tl.zeros((LANES,), tl.uint32) + flags.to(tl.uint32)
    for _ in tl.static_range(7):
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m0, m1)
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m2, m3)
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m4, m5)
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m6, m7)
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m8, m9)
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m10, m11)
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m12, m13)
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m14, m15)
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = (
            m2, m6, m3, m10, m7, m0, m4, m13, m1, m11, m12, m5, m9, m14, m15, m8,
        )  # fmt: skip
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@triton.jit
def _four(words, at, end, LANES: tl.constexpr):
    """Return the four words at byte ``at``, a multiple of 16, with one load: a load takes a cycle for each cache line, and each
    lane has its own. Nothing is read from ``end``."""
    places = words + (at // 4)[:, None] + tl.arange(0, 4)[None, :]
    places = tl.max_contiguous(tl.multiple_of(places, [16, 16]), [1, 4])
    found = tl.load(places, mask=tl.broadcast_to((at < end)[:, None], (LANES, 4)), other=0)
    even, odd = tl.split(tl.reshape(found, (LANES, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _shifted(low, high, shift):
    """Return 32 bits from bit ``shift`` of ``low`` on."""
    return (((high.to(tl.uint64) << 32) | low) >> shift).to(tl.uint32)


@triton.jit
def _block(words, skip, at, end, LANES: tl.constexpr):
    """Return the sixteen words that begin ``skip`` (0 to 15) bytes after byte ``at``, a multiple of 16. From byte ``end`` of
    ``words`` on, they may have any bits."""
    w0, w1, w2, w3 = _four(words, at, end, LANES)
    w4, w5, w6, w7 = _four(words, at + 16, end, LANES)
    w8, w9, w10, w11 = _four(words, at + 32, end, LANES)
    w12, w13, w14, w15 = _four(words, at + 48, end, LANES)
    w16, w17, w18, w19 = _four(words, at + 64, end, LANES)
    two, one, shift = (skip & 8) > 0, (skip & 4) > 0, ((skip & 3) * 8).to(tl.uint64)
    w0, w1, w2 = tl.where(two, w2, w0), tl.where(two, w3, w1), tl.where(two, w4, w2)
    w3, w4, w5 = tl.where(two, w5, w3), tl.where(two, w6, w4), tl.where(two, w7, w5)
    w6, w7, w8 = tl.where(two, w8, w6), tl.where(two, w9, w7), tl.where(two, w10, w8)
    w9, w10, w11 = tl.where(two, w11, w9), tl.where(two, w12, w10), tl.where(two, w13, w11)
    w12, w13, w14 = tl.where(two, w14, w12), tl.where(two, w15, w13), tl.where(two, w16, w14)
    w15, w16, w17 = tl.where(two, w17, w15), tl.where(two, w18, w16), tl.where(two, w19, w17)
    w0, w1, w2 = tl.where(one, w1, w0), tl.where(one, w2, w1), tl.where(one, w3, w2)
    w3, w4, w5 = tl.where(one, w4, w3), tl.where(one, w5, w4), tl.where(one, w6, w5)
    w6, w7, w8 = tl.where(one, w7, w6), tl.where(one, w8, w7), tl.where(one, w9, w8)
    w9, w10, w11 = tl.where(one, w10, w9), tl.where(one, w11, w10), tl.where(one, w12, w11)
    w12, w13, w14 = tl.where(one, w13, w12), tl.where(one, w14, w13), tl.where(one, w15, w14)
    w15, w16 = tl.where(one, w16, w15), tl.where(one, w17, w16)
    return (
        _shifted(w0, w1, shift), _shifted(w1, w2, shift), _shifted(w2, w3, shift), _shifted(w3, w4, shift),
        _shifted(w4, w5, shift), _shifted(w5, w6, shift), _shifted(w6, w7, shift), _shifted(w7, w8, shift),
        _shifted(w8, w9, shift), _shifted(w9, w10, shift), _shifted(w10, w11, shift), _shifted(w11, w12, shift),
        _shifted(w12, w13, shift), _shifted(w13, w14, shift), _shifted(w14, w15, shift), _shifted(w15, w16, shift),
    )  # fmt: skip


@triton.jit
def _cut(word, left):
    """Return a word of which only ``left`` bytes are not zero."""
    bits = (tl.minimum(tl.maximum(left, 0), 4) * 8).to(tl.uint64)
    return (word & ((tl.full((), 1, tl.uint64) << bits) - 1)).to(tl.uint32)


@triton.jit
def leaves(table, values, LANES: tl.constexpr, LEAF: tl.constexpr):
    """Hash the leaves of each range. It is a whole object or a part of one, whose leaves before it are counted."""
    row = table + tl.program_id(1) * 4
    address = tl.load(row)
    end = tl.load(row + 1)
    first = tl.program_id(0).to(tl.int64) * LANES
    if first * LEAF < end:
        leaf = first + tl.arange(0, LANES)
        before = tl.load(row + 3)
        skip = address & 15
        words = (address - skip).to(tl.pointer_type(tl.uint32))
        h0, h1, h2, h3, h4, h5, h6, h7 = _initial(LANES)
        for block in range(LEAF // 64):
            at = leaf * LEAF + block * 64
            left = tl.minimum(end - leaf * LEAF, LEAF) - block * 64
            last = left <= 64
            flags = tl.where(last, 2, 0) + tl.where(last & (before * LEAF + end <= LEAF), 8, 0)
            if block == 0:
                flags += 1
            m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = _block(words, skip, at, skip + end, LANES)
            if (first + LANES) * LEAF > end:
                m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = (
                    _cut(m0, left), _cut(m1, left - 4), _cut(m2, left - 8), _cut(m3, left - 12),
                    _cut(m4, left - 16), _cut(m5, left - 20), _cut(m6, left - 24), _cut(m7, left - 28),
                    _cut(m8, left - 32), _cut(m9, left - 36), _cut(m10, left - 40), _cut(m11, left - 44),
                    _cut(m12, left - 48), _cut(m13, left - 52), _cut(m14, left - 56), _cut(m15, left - 60),
                )  # fmt: skip
            g0, g1, g2, g3, g4, g5, g6, g7 = _compress(
                h0, h1, h2, h3, h4, h5, h6, h7,
                m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
                before + leaf, tl.minimum(left, 64), flags, LANES,
            )  # fmt: skip
            some = left > 0
            h0, h1 = tl.where(some, g0, h0), tl.where(some, g1, h1)
            h2, h3 = tl.where(some, g2, h2), tl.where(some, g3, h3)
            h4, h5 = tl.where(some, g4, h4), tl.where(some, g5, h5)
            h6, h7 = tl.where(some, g6, h6), tl.where(some, g7, h7)
        _put(values + (tl.load(row + 2) + leaf) * 8, h0, h1, h2, h3, h4, h5, h6, h7, leaf * LEAF < end)


@triton.jit
def _put(to, h0, h1, h2, h3, h4, h5, h6, h7, inside):
    tl.store(to, h0, mask=inside)
    tl.store(to + 1, h1, mask=inside)
    tl.store(to + 2, h2, mask=inside)
    tl.store(to + 3, h3, mask=inside)
    tl.store(to + 4, h4, mask=inside)
    tl.store(to + 5, h5, mask=inside)
    tl.store(to + 6, h6, mask=inside)
    tl.store(to + 7, h7, mask=inside)


@triton.jit
def _get(source, k, inside):
    return tl.load(source + k, mask=inside, other=0)


@triton.jit
def tree(table, values, others, digests, LANES: tl.constexpr, LEAF: tl.constexpr):
    """Each level reads the values from one buffer and writes to the other."""
    row = table + tl.program_id(0) * 4
    n = tl.cdiv(tl.load(row + 1), LEAF)
    first = tl.load(row + 2) * 8
    source = values + first
    target = others + first
    word = tl.arange(0, 8)
    while n > 1:
        pairs = n // 2
        flags = tl.where(n == 2, 12, 4)
        for start in range(0, pairs, LANES):
            pair = start + tl.arange(0, LANES)
            inside = pair < pairs
            m = source + pair * 16
            h0, h1, h2, h3, h4, h5, h6, h7 = _initial(LANES)
            h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
                h0, h1, h2, h3, h4, h5, h6, h7,
                _get(m, 0, inside), _get(m, 1, inside), _get(m, 2, inside), _get(m, 3, inside),
                _get(m, 4, inside), _get(m, 5, inside), _get(m, 6, inside), _get(m, 7, inside),
                _get(m, 8, inside), _get(m, 9, inside), _get(m, 10, inside), _get(m, 11, inside),
                _get(m, 12, inside), _get(m, 13, inside), _get(m, 14, inside), _get(m, 15, inside),
                pair * 0, pair * 0 + 64, pair * 0 + flags, LANES,
            )  # fmt: skip
            _put(target + pair * 8, h0, h1, h2, h3, h4, h5, h6, h7, inside)
        if n % 2 == 1:  # the last has no partner yet
            tl.store(target + pairs * 8 + word, tl.load(source + (n - 1) * 8 + word))
        n = pairs + n % 2
        tl.debug_barrier()
        swap = source
        source = target
        target = swap
    tl.store(digests + tl.program_id(0) * 8 + word, tl.load(source + word))
