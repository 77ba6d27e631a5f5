"""A Deflate coder (RFC 1951) with Huffman codes and runs of zeros.

A program codes one stream as one block. Code lengths approximate Huffman's without building a tree: each symbol gets the length
that its frequency requires, rounded from the lowest threshold that Kraft's inequality permits; then the codes that gain most are
shortened until the code is complete. Frequencies are counted in every fourth byte. The result is about one percent larger than
with Huffman's lengths. Four symbols at a time are written to the output.

A byte needs at least one bit, which is too much if nearly all bytes are zero, as in the upper planes of a delta. There, words of
four zeros that follow a zero are coded as runs.
"""

import triton
import triton.language as tl


@triton.jit
def reversed_bits(code, length):
    """Reverse the lowest ``length`` of 16 bits: Deflate writes codes from the highest bit."""
    code = ((code & 0x5555) << 1) | ((code >> 1) & 0x5555)
    code = ((code & 0x3333) << 2) | ((code >> 2) & 0x3333)
    code = ((code & 0x0F0F) << 4) | ((code >> 4) & 0x0F0F)
    code = ((code & 0x00FF) << 8) | ((code >> 8) & 0x00FF)
    return code >> (16 - length)


@triton.jit
def _byte(word, at, j, n):
    """Return byte ``j`` of each word; zero after the end of the stream."""
    return tl.where(4 * at + j < n, (word >> (8 * j)) & 255, 0)


@triton.jit
def _count(source, n, table, WORDS: tl.constexpr, TIMES: tl.constexpr):
    """Store the frequency of each byte, counted in every fourth, and at least 1 for each byte that may occur: zero, and bytes
    between the smallest other byte and the largest. Return whether an eighth of the words are zero."""
    quiet = tl.zeros((WORDS,), tl.int32)
    most = tl.zeros((WORDS,), tl.int32)
    least = tl.full((WORDS,), 255, tl.int32)  # of those that are not zero, minus one
    found = tl.zeros((256,), tl.int32)
    behind = 0  # bytes after the end, counted as zeros
    for i in range(TIMES):
        at = i * WORDS + tl.arange(0, WORDS)
        word = tl.load(source + at, mask=4 * at < n, other=0).to(tl.int32)
        quiet += ((word == 0) & (4 * at < n)).to(tl.int32)
        for j in tl.static_range(4):
            byte = _byte(word, at, j, n)
            most = tl.maximum(most, byte)
            least = tl.minimum(least, (byte - 1) & 255)
        found += tl.histogram(_byte(word, at, i % 4, n), 256)
        behind += tl.sum((4 * at + i % 4 >= n).to(tl.int32))
    value = tl.arange(0, 256)
    found -= tl.where(value == 0, behind, 0)
    may = (value == 0) | ((value > tl.min(least, 0)) & (value <= tl.max(most, 0)))
    tl.store(table + value, tl.where(may, 4 * found + 1, 0))
    return 32 * tl.sum(quiet) >= n


@triton.jit
def _run(source, at, n, WORDS: tl.constexpr, LONGEST: tl.constexpr):
    """Return which words are zero after a zero byte, which of these end a run, and the words in the run."""
    lane = tl.arange(0, WORDS)
    word = tl.load(source + at, mask=4 * at < n, other=0)
    before = tl.load(source + at - 1, mask=(at > 0) & (4 * at < n), other=1 << 24)
    after = tl.load(source + at + 1, mask=4 * at + 8 <= n, other=1)
    inside = (word == 0) & (before >> 24 == 0) & (4 * at + 4 <= n)
    count = lane - tl.associative_scan(tl.where(inside, -1, lane), 0, _larger)
    ends = inside & ((after != 0) | (lane == WORDS - 1) | (count % LONGEST == 0))
    return inside, ends, (count - 1) % LONGEST + 1


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _named(words):
    """Return Deflate's symbol for a run of so many words, the number of its extra bits, and these bits."""
    more = 4 * words - 3
    bits = ((more >= 8).to(tl.int32) + (more >= 16).to(tl.int32) + (more >= 32).to(tl.int32)) + (
        (more >= 64).to(tl.int32) + (more >= 128).to(tl.int32)
    )
    symbol = tl.where(more < 4, 257 + more, 261 + 4 * bits + ((more >> bits) & 3))
    return symbol, bits, more & ((1 << bits) - 1)


@triton.jit
def _count_runs(source, n, table, SYMBOLS: tl.constexpr, WORDS: tl.constexpr, TIMES: tl.constexpr, LONGEST: tl.constexpr):
    """Replace the result of ``_count`` by the frequencies of runs and of bytes outside them, if runs pay; return whether they do.
    A word in a run saves at least four bits, and nearly every run takes at most eight."""
    symbol = tl.arange(0, SYMBOLS)
    found = tl.zeros((SYMBOLS,), tl.int32)
    gain = tl.zeros((WORDS,), tl.int32)
    for i in range(TIMES):
        at = i * WORDS + tl.arange(0, WORDS)
        word = tl.load(source + at, mask=4 * at < n, other=0).to(tl.int32)
        inside, ends, words = _run(source, at, n, WORDS, LONGEST)
        gain += 4 * inside.to(tl.int32) - 8 * ends.to(tl.int32)
        run, _, _ = _named(words)
        byte = tl.where(4 * at + i % 4 < n, _byte(word, at, i % 4, n), SYMBOLS - 1)
        found += tl.histogram(tl.where(ends, run, tl.where(inside, SYMBOLS - 1, byte)), SYMBOLS)
    before = tl.load(table + symbol, mask=symbol < 256, other=0)
    tl.debug_barrier()
    pays = tl.sum(gain) > 128
    counts = tl.where(before > 0, 4 * found + 1, tl.where((symbol > 256) & (symbol < SYMBOLS - 1), found, 0))
    tl.store(table + symbol, tl.where(pays, counts, before))
    return pays


@triton.jit
def _lengths(counts, SYMBOLS: tl.constexpr, FULL: tl.constexpr, ROUNDS: tl.constexpr):
    """Return the lengths of a complete code for all symbols that may occur."""
    symbol = tl.arange(0, SYMBOLS)
    some = counts > 0
    share = tl.log2(tl.sum(counts).to(tl.float32)) - tl.log2(tl.maximum(counts, 1).to(tl.float32))
    low = -0.01
    high = 1.0
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        length = tl.minimum(tl.maximum(tl.ceil(share - middle), 1), 15).to(tl.int32)
        fits = tl.sum(tl.where(some, FULL >> length, 0)) <= FULL
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    length = tl.minimum(tl.maximum(tl.ceil(share - low), 1), 15).to(tl.int32)
    left = FULL - tl.sum(tl.where(some, FULL >> length, 0))
    while left > 0:  # a multiple of the share of the longest codes, so one of them can be shortened
        takes = FULL >> length
        gain = tl.where(some & (length > 1) & (takes <= left), counts << length, -1)
        best = symbol == tl.argmax(gain, 0)
        left -= tl.sum(tl.where(best, takes, 0))
        length -= best.to(tl.int32)
    return tl.where(some, length, 0)


@triton.jit
def canonical(length):
    """Return the codes of these lengths, which are ordered by length and then by symbol; undefined where the length is 0."""
    rank = tl.zeros(length.shape, tl.int32)
    begin = tl.zeros(length.shape, tl.int32)
    first = 0
    for part in tl.static_range(3):  # five lengths are counted in one number
        shift = (length - 1 - 5 * part) * 12
        inside = (length > 5 * part) & (length <= 5 * part + 5)
        counted = tl.where(inside, tl.full(length.shape, 1, tl.int64) << shift, 0)
        before = tl.cumsum(counted, 0) - counted
        rank = tl.where(inside, ((before >> shift) & 4095).to(tl.int32), rank)
        total = tl.sum(counted)
        for k in tl.static_range(5):
            begin = tl.where(length == 5 * part + k + 1, first, begin)
            first = (first + ((total >> (12 * k)) & 4095).to(tl.int32)) * 2
    return begin + rank


@triton.jit
def _codes(length):
    """Return Deflate's codes of these lengths."""
    return tl.where(length > 0, reversed_bits(canonical(length), length), 0)


@triton.jit
def _clear(out, cleared, end, SPAN: tl.constexpr):
    """Store zeros from the word ``cleared`` to the words that bits before ``end`` may touch; return where they end."""
    until = end // 64 + 2
    for start in range(cleared, until, SPAN):
        word = start + tl.arange(0, SPAN)
        tl.store(out + word, tl.zeros((SPAN,), tl.int64), mask=word < until)
    tl.debug_barrier()
    return until


@triton.jit
def _put(out, at, bits, some):
    """Add up to 60 bits (int64) to zeros."""
    first = bits << (at & 63)
    second = (bits >> 1) >> (63 - (at & 63))
    word = out + (at >> 6)
    tl.atomic_or(word, first, mask=some & (first != 0), sem="relaxed")
    tl.atomic_or(word + 1, second, mask=some & (second != 0), sem="relaxed")


@triton.jit
def _entry(table, word, at, j: tl.constexpr, n):
    """Return the length and the code of a byte of each word."""
    entry = tl.load(table + ((word >> (8 * j)) & 255), mask=4 * at + j < n, other=0)
    return entry >> 16, (entry & 0xFFFF).to(tl.int64)


@triton.jit
def code(
    sources, sizes, targets, coded, tables, head_low, head_high,
    HEAD: tl.constexpr, OFTEN: tl.constexpr, SYMBOLS: tl.constexpr, FULL: tl.constexpr, ROUNDS: tl.constexpr,
    WORDS: tl.constexpr, TIMES: tl.constexpr, ROOM: tl.constexpr, DISTANCE: tl.constexpr, LONGEST: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    """Code one stream. Without ``RUNS``, streams that may have runs are left to a second launch, since finding them is slow."""
    if RUNS and tl.load(coded + tl.program_id(0)) >= 0:
        return
    source = tl.load(sources + tl.program_id(0)).to(tl.pointer_type(tl.uint32))
    n = tl.load(sizes + tl.program_id(0)).to(tl.int32)
    out = tl.load(targets + tl.program_id(0)).to(tl.pointer_type(tl.int64))
    table = tables + tl.program_id(0) * SYMBOLS
    symbol = tl.arange(0, SYMBOLS)

    runs = _count(source, n, table, WORDS, TIMES)
    tl.debug_barrier()
    if RUNS:
        runs = _count_runs(source, n, table, SYMBOLS, WORDS, TIMES, LONGEST)
        tl.debug_barrier()
    elif runs:
        tl.store(coded + tl.program_id(0), -1)
        return
    distance = tl.where(RUNS & runs, DISTANCE, 257)  # its position, after all symbols
    counts = tl.where(symbol == 256, 1, tl.load(table + symbol, mask=(symbol < distance) & (symbol != 256), other=0))
    length = _lengths(counts, SYMBOLS, FULL, ROUNDS)
    code = _codes(length)
    tl.debug_barrier()
    tl.store(table + symbol, code | (length << 16))

    length = tl.where((symbol == DISTANCE) & (distance == DISTANCE), 1, length)
    told = tl.where(symbol > distance, 0, tl.where(length == OFTEN, 4, tl.where(length > 0, 5, 1)))
    done = HEAD + tl.sum(told)
    cleared = _clear(out, 0, done, SYMBOLS)
    few = tl.arange(0, 2)
    _put(out, few * 48, tl.where(few == 0, head_low + ((distance - 257) << 3), head_high).to(tl.int64), few < 2)
    rank = tl.where(length < OFTEN, length - 1, length - 2)
    name = tl.where(length == OFTEN, 1, reversed_bits(18 + rank, 5))
    _put(out, HEAD + tl.cumsum(told, 0) - told, name.to(tl.int64), length > 0)

    for i in range(TIMES):
        at = i * WORDS + tl.arange(0, WORDS)
        word = tl.load(source + at, mask=4 * at < n, other=0).to(tl.int32)
        length0, code0 = _entry(table, word, at, 0, n)
        length1, code1 = _entry(table, word, at, 1, n)
        length2, code2 = _entry(table, word, at, 2, n)
        length3, code3 = _entry(table, word, at, 3, n)
        two = length0 + length1
        three = two + length2
        taken = three + length3
        bits = code0 | (code1 << length0) | (code2 << two) | (code3 << three)
        if RUNS:
            inside, ends, words = _run(source, at, tl.where(runs, n, 0), WORDS, LONGEST)
            run, more, which = _named(words)
            entry = tl.load(table + run, mask=ends, other=0)
            taken = tl.where(inside, tl.where(ends, (entry >> 16) + more + 1, 0), taken)
            bits = tl.where(inside, (entry & 0xFFFF).to(tl.int64) | (which.to(tl.int64) << (entry >> 16)), bits)
        begin = done + tl.cumsum(taken, 0) - taken
        done += tl.sum(taken)
        if done <= ROOM:
            cleared = _clear(out, cleared, done, SYMBOLS)
            _put(out, begin, bits, (4 * at < n) & (taken > 0))
    if done <= ROOM:
        last = symbol == 256
        _clear(out, cleared, done + 15, SYMBOLS)
        _put(out, done + symbol * 0, code.to(tl.int64), last)
    end = done + tl.sum(tl.where(symbol == 256, length, 0))
    tl.store(coded + tl.program_id(0), tl.where(done <= ROOM, (end + 7) // 8, 1 << 30).to(tl.int64))
