"""BLAKE3 of many ranges of device memory at once: ``coding.digest.stored_digest`` of what is stored.

A CPU core hashes 2 to 4 GB/s, and an H100 900 GB/s. Each lane of a program hashes a leaf of 1 KiB; then one program builds the
tree of each object, level by level. The constants, the permutation and the flags are those of the specification
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
    for _ in range(7):
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
def _word(words, shift, at, end):
    """Return the 32 bits at byte ``at``, with zeros from ``end``. ``words``: aligned, ``shift`` bits before byte 0. A word
    without bytes before ``end`` is not read."""
    low = tl.load(words + at // 4, mask=at < end, other=0)
    high = tl.load(words + at // 4 + 1, mask=at + 4 - shift // 8 < tl.where(shift > 0, end, 0), other=0)
    word = (low >> shift) | tl.where(shift > 0, high << (32 - shift), 0)
    bits = (tl.minimum(tl.maximum(end - at, 0), 4) * 8).to(tl.uint32)
    return tl.where(bits < 32, word & ((1 << bits) - 1), word)


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
        shift = ((address & 3) * 8).to(tl.uint32)
        words = (address - (address & 3)).to(tl.pointer_type(tl.uint32))
        h0, h1, h2, h3, h4, h5, h6, h7 = _initial(LANES)
        for block in range(LEAF // 64):
            at = leaf * LEAF + block * 64
            left = tl.minimum(end - leaf * LEAF, LEAF) - block * 64
            last = left <= 64
            flags = tl.where(last, 2, 0) + tl.where(last & (before * LEAF + end <= LEAF), 8, 0)
            if block == 0:
                flags += 1
            g0, g1, g2, g3, g4, g5, g6, g7 = _compress(
                h0, h1, h2, h3, h4, h5, h6, h7,
                _word(words, shift, at, end), _word(words, shift, at + 4, end),
                _word(words, shift, at + 8, end), _word(words, shift, at + 12, end),
                _word(words, shift, at + 16, end), _word(words, shift, at + 20, end),
                _word(words, shift, at + 24, end), _word(words, shift, at + 28, end),
                _word(words, shift, at + 32, end), _word(words, shift, at + 36, end),
                _word(words, shift, at + 40, end), _word(words, shift, at + 44, end),
                _word(words, shift, at + 48, end), _word(words, shift, at + 52, end),
                _word(words, shift, at + 56, end), _word(words, shift, at + 60, end),
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
