"""A decoder of the Deflate streams that ``deflate`` writes: one block, codes of literals and of runs of zeros.

A program of one warp decodes one stream. Each lane decodes an equal part of its bits, from a place that it finds itself: Huffman
codes synchronize, so a lane that begins some codes before its part, at any bit, is nearly always at the begin of a code when it
comes to its part (Weissenberger and Schmidt 2018, "Massively parallel Huffman decoding on GPUs"). Then every lane counts what its
part decodes to, and tells the next lane where its last code ends. Lanes that had begun elsewhere count again until all agree,
which proves that the stream is decoded as from its begin; at last all lanes write.

Streams of another form get the status 1, and are left to another decoder. Nothing is read or written outside a stream's memory,
whatever its bytes are.
"""

import triton
import triton.language as tl

from .deflate import canonical, reversed_bits


@triton.jit
def _peek(words, at, last):
    """Return the 64 bits from bit ``at`` on; zeros after the word ``last``."""
    word = at >> 6
    shift = (at & 63).to(tl.uint64)
    low = tl.load(words + word, mask=word <= last, other=0)
    high = tl.load(words + word + 1, mask=word < last, other=0)
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def _read_lengths(words, at, last, count, lengths):
    """Store ``count`` code lengths, whose code is constant: see ``constants.OFTEN``. Return the bit after them."""
    for start in range(0, count, 12):  # of at most five bits each
        bits = _peek(words, at, last)
        used = at * 0
        for k in tl.static_range(12):
            five = ((bits >> used.to(tl.uint64)) & 31).to(tl.int32)
            name = reversed_bits(five, 5)
            rank = name - 18
            length = tl.where(five & 1 == 0, 0, tl.where(rank < 0, 7, tl.where(rank < 6, rank + 1, rank + 2)))
            width = tl.where(five & 1 == 0, 1, tl.where(rank < 0, 4, 5))
            inside = start + k < count
            tl.store(lengths + start + k, length, mask=inside)
            used += tl.where(inside, width, 0)
        at += used
    return at


@triton.jit
def _build(lengths, limits, keys, symbols, entries, distance, SYMBOLS: tl.constexpr, BITS: tl.constexpr):
    """Store what decodes a code: ``limits`` and ``keys`` by length, ``symbols`` in the order of their codes, and ``entries`` by
    the next ``BITS`` bits: symbol and length, the length 0 for longer codes. Return whether the code is complete."""
    symbol = tl.arange(0, SYMBOLS)
    length = tl.load(lengths + symbol, mask=symbol < distance, other=0)
    by_length = tl.arange(0, 16)
    counts = tl.where(by_length > 0, tl.histogram(length, 16), 0)
    takes = counts << (15 - by_length)
    limit = tl.cumsum(takes, 0)
    tl.store(limits + by_length, limit)
    tl.store(keys + by_length, tl.cumsum(counts, 0) - counts - ((limit - takes) >> (15 - by_length)))
    tl.debug_barrier()
    key = tl.load(keys + length)
    tl.store(symbols + key + canonical(length), symbol.to(tl.int16), mask=length > 0)
    tl.debug_barrier()
    bits = tl.arange(0, 1 << BITS)
    code = reversed_bits(bits, BITS) << (15 - BITS)
    width = tl.full(bits.shape, 1, tl.int32)
    for k in tl.static_range(1, 15):
        width += (code >= tl.load(limits + k)).to(tl.int32)
    found = tl.load(symbols + tl.load(keys + width) + (code >> (15 - width)), mask=width <= BITS, other=0)
    tl.store(entries + bits, tl.where(width <= BITS, found | (width << 9), 0).to(tl.int16))
    tl.debug_barrier()
    return tl.sum(takes) == 1 << 15


@triton.jit
def _scan(
    words, last, at, until, tables, out, offset, n,
    WRITE: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, ROUND: tl.constexpr, STOP: tl.constexpr,
):  # fmt: skip
    """Decode from bit ``at`` of each lane up to bit ``until``; return the bit after the last code, ``STOP`` after the end of the
    block, and how many bytes were decoded. ``WRITE``: store them from ``out + offset`` on, up to ``out + n``."""
    limits, keys, symbols, entries = tables
    count = tl.zeros((LANES,), tl.int32)
    while tl.max((at < until).to(tl.int32)) > 0:
        bits = _peek(words, at, last)
        used = tl.zeros((LANES,), tl.int32)
        for _ in tl.static_range(ROUND):
            live = (at + used < until) & (used <= 43)  # a code, its extra bits and a distance have at most 21
            next = (bits >> used.to(tl.uint64)).to(tl.int32)
            entry = tl.load(entries + (next & ((1 << BITS) - 1)), mask=live, other=1 << 9).to(tl.int32)
            long = live & (entry < 1 << 9)
            if tl.max(long.to(tl.int32)) > 0:
                code = reversed_bits(next & 0x7FFF, 15)
                longer = tl.full((LANES,), 1, tl.int32)
                for k in tl.static_range(1, 15):
                    longer += (code >= tl.load(limits + k)).to(tl.int32)
                found = tl.load(symbols + tl.load(keys + longer) + (code >> (15 - longer)), mask=long, other=0).to(tl.int32)
                entry = tl.where(long, found | (longer << 9), entry)
            symbol = entry & 511
            width = entry >> 9
            run = symbol - 257  # if it is not negative; the distance has one bit
            extra = tl.where((run < 8) | (run == 28), 0, (run >> 2) - 1)
            repeated = 3 + tl.where(run < 8, run, tl.where(run == 28, 255, (4 + (run & 3)) << extra))
            repeated += (next >> width) & ((1 << extra) - 1)
            if WRITE:
                tl.store(out + offset + count, symbol.to(tl.uint8), mask=live & (symbol < 256) & (offset + count < n))
            count += tl.where(live & (symbol != 256), tl.where(run < 0, 1, repeated), 0)
            used += tl.where(live, width + tl.where(run < 0, 0, extra + 1), 0)
            at = tl.where(live & (symbol == 256), STOP, at)
        at = tl.minimum(at + used, STOP)
    return at, count


@triton.jit
def decode(
    sources, sizes, targets, most, decoded, status, scratch, head_low, head_high,
    HEAD: tl.constexpr, SYMBOLS: tl.constexpr, DISTANCE: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr,
    SYNC: tl.constexpr, ROUND: tl.constexpr, SCRATCH: tl.constexpr, STOP: tl.constexpr,
):  # fmt: skip
    """Decode one stream."""
    source = tl.load(sources + tl.program_id(0))
    n = tl.load(most + tl.program_id(0)).to(tl.int32)
    out = tl.load(targets + tl.program_id(0)).to(tl.pointer_type(tl.uint8))
    words = (source & -8).to(tl.pointer_type(tl.uint64))
    begin = ((source & 7) * 8).to(tl.int32)
    end = begin + tl.load(sizes + tl.program_id(0)).to(tl.int32) * 8
    last = (end - 1) >> 6
    table = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    lengths = table.to(tl.pointer_type(tl.int32))
    limits = lengths + SYMBOLS
    keys = limits + 16
    ends = keys + 16
    symbols = (table + 4 * (SYMBOLS + 32 + LANES)).to(tl.pointer_type(tl.int16))
    entries = symbols + SYMBOLS

    low = _peek(words, begin, last)
    distance = 257 + ((low >> 3) & 31).to(tl.int32)
    fits = ((low & 0xFFFFFFFFFF07) == head_low.to(tl.uint64)) & ((distance == 257) | (distance == DISTANCE))
    fits = fits & ((_peek(words, begin + 48, last) & ((1 << (HEAD - 48)) - 1)) == head_high.to(tl.uint64)) & (end > begin + HEAD)
    if not fits:
        tl.store(status + tl.program_id(0), 1)
        return
    start = _read_lengths(words, begin + HEAD, last, distance + 1, lengths)
    tl.debug_barrier()
    if not _build(lengths, limits, keys, symbols, entries, distance, SYMBOLS, BITS):
        tl.store(status + tl.program_id(0), 1)
        return
    tables = (limits, keys, symbols, entries)

    lane = tl.arange(0, LANES)
    part = (end - start + LANES - 1) // LANES
    first = start + lane * part
    until = tl.minimum(first + part, end)
    nothing = tl.zeros((LANES,), tl.int32)
    at, count = _scan(
        words, last, tl.maximum(first - SYNC, start), first, tables, out, nothing, 0, False, BITS, LANES, ROUND, STOP
    )
    stop, count = _scan(words, last, at, until, tables, out, nothing, 0, False, BITS, LANES, ROUND, STOP)
    tl.store(ends + lane, stop)
    tl.debug_barrier()
    right = tl.load(ends + lane - 1, mask=lane > 0, other=0)
    right = tl.where(lane == 0, start, right)
    while tl.max((at != right).to(tl.int32)) > 0:
        wrong = at != right
        at = right
        again, counted = _scan(
            words, last, tl.where(wrong, at, STOP), until, tables, out, nothing, 0, False, BITS, LANES, ROUND, STOP
        )
        stop = tl.where(wrong, again, stop)
        count = tl.where(wrong, counted, count)
        tl.debug_barrier()
        tl.store(ends + lane, stop)
        tl.debug_barrier()
        right = tl.load(ends + lane - 1, mask=lane > 0, other=0)
        right = tl.where(lane == 0, start, right)

    total = tl.sum(count)
    if (total != n) | (tl.max(tl.where(lane == LANES - 1, stop, 0)) != STOP):
        tl.store(status + tl.program_id(0), 1)
        return
    if distance == DISTANCE:  # runs are of zeros
        for begin_of in range(0, n, 1024):
            byte = begin_of + tl.arange(0, 1024)
            tl.store(out + byte, tl.zeros((1024,), tl.uint8), mask=byte < n)
        tl.debug_barrier()
    offset = tl.cumsum(count, 0) - count
    _scan(words, last, at, until, tables, out, offset, n, True, BITS, LANES, ROUND, STOP)
    tl.store(decoded + tl.program_id(0), n.to(tl.int64))
    tl.store(status + tl.program_id(0), 0)
