"""Kernels over words: the counterparts of ``storage.coding.kernels`` and ``storage.coding.digest``.

Every kernel takes a table in device memory with a row for each chunk, and works on all of them in one launch: a state has
thousands of chunks, and a launch for each would cost the training process more than the work itself.
"""

import triton
import triton.language as tl


@triton.jit
def _rotate(v, W: tl.constexpr):
    """Rotate words left by one bit. Words of two bytes come in pairs, in an int32."""
    t = (v << 1) | ((v >> (8 * W - 1)) & 1)
    if W == 2:  # bits of one half must not enter the other
        t = ((v << 1) & -65537) | ((v >> 15) & 0x00010001)
    return t


@triton.jit
def _rotate_back(t, W: tl.constexpr):
    """Invert ``_rotate``."""
    if W == 2:
        v = ((t >> 1) & 0x7FFF7FFF) | ((t << 15) & -2147450880)
    elif W == 4:
        v = ((t >> 1) & 0x7FFFFFFF) | (t << 31)
    else:
        v = ((t >> 1) & 0x7FFFFFFFFFFFFFFF) | (t << 63)
    return v


@triton.jit
def _signed(t, W: tl.constexpr):
    """Return the signed differences that ``storage.coding.kernels.subtract`` has encoded: 0, 1, 2 are 0, -1, 1."""
    half = (t >> 1) & (0x7FFFFFFFFFFFFFFF if W == 8 else 0x7FFFFFFF)
    return half ^ -(t & 1)


@triton.jit
def _joined(row, at, inside, W: tl.constexpr, LANES: tl.constexpr):
    """Join words from their planes, whose addresses are in ``row`` from column 2."""
    t = tl.zeros((LANES,), tl.int64) if W == 8 else tl.zeros((LANES,), tl.int32)
    for p in tl.static_range(W):
        byte = tl.load(tl.load(row + 2 + p).to(tl.pointer_type(tl.uint8)) + at, mask=inside, other=0)
        t = t | (byte.to(t.dtype) << (8 * p))
    return t


@triton.jit
def rounded(x, BF16: tl.constexpr):
    """Round float32, as int32, to bfloat16 or float16; the result is in the lower half of an int32."""
    if BF16:  # to nearest, ties to even
        made = (x + 0x7FFF + ((x >> 16) & 1)) >> 16
    else:
        made = x.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return made & 0xFFFF


@triton.jit
def _exchanged(v):
    """``storage.coding.kernels.exchanged`` of 32-bit words, as int64."""
    return (((v >> 16) & 0xFFFF) | (v << 16)).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _total(low, high, word, lane, ITEM: tl.constexpr):
    """Multiply sums of items over blocks by the keys of their words in a block, and add them up."""
    if ITEM == 8:
        total = tl.sum(low * tl.load(word + 2 * lane) + high * tl.load(word + 2 * lane + 1))
    else:
        total = tl.sum(low * (tl.load(word + lane * ITEM // 4) << (8 * ITEM * (lane % (4 // ITEM)))))
    return total


@triton.jit
def transform(
    table,
    keys,
    block_keys,
    digests,
    samples,
    odds,
    W: tl.constexpr,
    ROTATE: tl.constexpr,
    SPLIT: tl.constexpr,
    JOIN: tl.constexpr,
    ADD: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
    SAMPLE: tl.constexpr,
    PAIR: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Process the same ``SLICE`` words of 32 bits of each of the digest blocks ``first`` to ``first + GROUP`` of one chunk.

    The sum of ``word * key(block)`` over the blocks is multiplied by ``key(word)`` once at the end. ``PACKED``: words of one
    or two bytes are read four or two at a time. ``SAMPLE``: only the first slice of each block is read. ``PAIR``: the halves of
    the second number of ``digest_pair`` are added to ``samples`` and ``odds``; their keys follow the others in both tables, and
    they need whole words of 32 bits.
    """
    ITEM: tl.constexpr = 4 if PACKED and W < 4 else W  # bytes of an item: what a lane reads at a time
    LANES: tl.constexpr = 4 * SLICE // ITEM
    slices: tl.constexpr = 1 if SAMPLE else BLOCK // SLICE
    chunk = tl.program_id(1)
    part = tl.program_id(0) % slices
    first = tl.program_id(0) // slices * GROUP
    row = table + chunk * 10
    n = tl.load(row + 1) * W // ITEM
    if (first * BLOCK + part * SLICE).to(tl.int64) * 4 // ITEM < n:
        lane = tl.arange(0, LANES)
        if ITEM == 1:
            items = tl.load(row).to(tl.pointer_type(tl.uint8))
        elif ITEM == 2:
            items = tl.load(row).to(tl.pointer_type(tl.int16))
        elif ITEM == 4:
            items = tl.load(row).to(tl.pointer_type(tl.int32))
        else:
            items = tl.load(row).to(tl.pointer_type(tl.int64))
        low = tl.zeros((LANES,), tl.int64)
        high = tl.zeros((LANES,), tl.int64)
        odd = tl.zeros((LANES,), tl.int32)
        second_low = tl.zeros((LANES,), tl.int64)
        second_high = tl.zeros((LANES,), tl.int64)
        third_low = tl.zeros((LANES,), tl.int64)
        third_high = tl.zeros((LANES,), tl.int64)
        for g in range(GROUP):
            block = first + g
            at = (block * BLOCK + part * SLICE).to(tl.int64) * 4 // ITEM + lane
            inside = at < n
            if ROUND != "":
                x = tl.load(tl.load(row + 2).to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
                v = rounded(x, ROUND == "bfloat16")
                tl.store(items + at, v.to(tl.int16), mask=inside)
            elif JOIN:
                t = tl.zeros((LANES,), tl.int64) if ITEM == 8 else tl.zeros((LANES,), tl.int32)
                if W == 1 and ITEM == 4:
                    t = tl.load(tl.load(row + 2).to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
                elif W == 2 and ITEM == 4:
                    lower = tl.load(tl.load(row + 2).to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0).to(tl.int32)
                    upper = tl.load(tl.load(row + 3).to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0).to(tl.int32)
                    t = (lower & 255) | ((lower & 0xFF00) << 8) | ((upper & 255) << 8) | ((upper & 0xFF00) << 16)
                else:
                    t = _joined(row, at, inside, W, LANES)
                v = _rotate_back(t, W) if ROTATE else t
                if ADD:
                    v = _signed(t, W) + tl.load(items + at, mask=inside, other=0).to(t.dtype)
                tl.store(items + at, v.to(items.dtype.element_ty), mask=inside)
            else:
                v = tl.load(items + at, mask=inside, other=0)
                if ITEM < 4:
                    v = v.to(tl.int32)
            if ITEM < 4:
                v = v & ((1 << (8 * ITEM)) - 1)
            key = tl.load(block_keys + block)
            if SPLIT:
                t = _rotate(v, W) if ROTATE else v
                if W == 1 and ITEM == 4:
                    tl.store(tl.load(row + 2).to(tl.pointer_type(tl.int32)) + at, t, mask=inside)
                elif W == 2 and ITEM == 4:
                    lower = (t & 255) | ((t >> 8) & 0xFF00)
                    upper = ((t >> 8) & 255) | ((t >> 16) & 0xFF00)
                    tl.store(tl.load(row + 2).to(tl.pointer_type(tl.int16)) + at, lower.to(tl.int16), mask=inside)
                    tl.store(tl.load(row + 3).to(tl.pointer_type(tl.int16)) + at, upper.to(tl.int16), mask=inside)
                    odd = odd | (t & 0x00010001)
                else:
                    for p in tl.static_range(W):
                        plane = tl.load(row + 2 + p).to(tl.pointer_type(tl.uint8))
                        tl.store(plane + at, ((t >> (8 * p)) & 255).to(tl.uint8), mask=inside)
                    odd = odd | (t & 1).to(tl.int32)
            low += (v.to(tl.int64) & 0xFFFFFFFF) * key
            if ITEM == 8:
                high += ((v >> 32) & 0xFFFFFFFF) * key
            if PAIR:
                second_key = tl.load(block_keys + BLOCKS + block)
                third_key = tl.load(block_keys + 2 * BLOCKS + block)
                second_low += (v.to(tl.int64) & 0xFFFFFFFF) * second_key
                third_low += _exchanged(v.to(tl.int32)) * third_key
                if ITEM == 8:
                    second_high += ((v >> 32) & 0xFFFFFFFF) * second_key
                    third_high += _exchanged((v >> 32).to(tl.int32)) * third_key
        word = keys + part * SLICE
        total = _total(low, high, word, lane, ITEM)
        if SAMPLE:
            tl.atomic_add(samples + chunk, total)
        else:
            tl.atomic_add(digests + chunk, total)
        if PAIR:
            tl.atomic_add(samples + chunk, _total(second_low, second_high, word + BLOCK, lane, ITEM))
            tl.atomic_add(odds + chunk, _total(third_low, third_high, word + 2 * BLOCK, lane, ITEM))
        if SPLIT:
            if part == 0:
                tl.atomic_add(samples + chunk, total)
            if tl.max(odd) != 0:
                tl.store(odds + chunk, 1)


@triton.jit
def compare(table, misses, W: tl.constexpr, ROUND: tl.constexpr, SPAN: tl.constexpr):
    """Check whether words of ``W`` bytes are those of another table, or float32 rounded to ``ROUND`` (bfloat16 or float16)."""
    row = table + tl.program_id(1) * 3
    n = tl.load(row + 2)
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = at < n
    if ROUND != "":
        x = tl.load(tl.load(row).to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
        found = tl.load(tl.load(row + 1).to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0).to(tl.int32)
        missed = (rounded(x, ROUND == "bfloat16") != found) | ((x & 0x7FFFFFFF) > 0x7F800000)  # nothing is derived from a NaN
    else:
        if W == 1:
            word = tl.pointer_type(tl.int8)
        elif W == 2:
            word = tl.pointer_type(tl.int16)
        elif W == 4:
            word = tl.pointer_type(tl.int32)
        else:
            word = tl.pointer_type(tl.int64)
        x = tl.load(tl.load(row).to(word) + at, mask=inside, other=0)
        missed = x != tl.load(tl.load(row + 1).to(word) + at, mask=inside, other=0)
    if tl.max((missed & inside).to(tl.int32)) != 0:
        tl.store(misses + tl.program_id(1), 1)
