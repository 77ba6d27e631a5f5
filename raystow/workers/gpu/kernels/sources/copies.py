"""Kernels that move bytes: copy, concatenate, pack, and transfer small results to the host."""

import triton
import triton.language as tl


@triton.jit
def move(table, SPAN: tl.constexpr):
    """Copy bytes. A row: source address, target address, bytes."""
    row = table + tl.program_id(1) * 3
    size = tl.load(row + 2)
    start = tl.program_id(0).to(tl.int64) * SPAN
    if start < size:
        source = tl.load(row).to(tl.pointer_type(tl.uint8))
        target = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
        for i in tl.static_range(SPAN // 4096):
            at = start + i * 4096 + tl.arange(0, 4096)
            tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


@triton.jit
def tell(source, target, n, MOST: tl.constexpr):
    """Copy ``n`` words of 64 bits to an address in host memory."""
    at = tl.program_id(0) * MOST + tl.arange(0, MOST)
    tl.store(target.to(tl.pointer_type(tl.int64)) + at, tl.load(source + at, mask=at < n, other=0), mask=at < n)


@triton.jit
def choose(owners, addresses, planes, out, stride, sizes, table, lengths, times, MOST: tl.constexpr):
    """Fill the rows of ``_move`` for the streams of one plane: the coded streams, or the raw plane if it is not larger."""
    owner = owners + 2 * tl.program_id(0)
    first = tl.load(owner)
    plane = tl.load(owner + 1)
    end = tl.load(owner + 2)
    sums = tl.zeros((MOST,), tl.int64)
    for i in range(times):
        stream = first + i * MOST + tl.arange(0, MOST)
        sums += tl.load(sizes + stream, mask=stream < end, other=0)
    gains = tl.sum(sums) < plane
    for i in range(times):
        stream = first + i * MOST + tl.arange(0, MOST)
        inside = stream < end
        coded = tl.load(sizes + stream, mask=inside, other=0)
        length = tl.where(gains, coded, tl.load(planes + stream, mask=inside, other=0))
        source = tl.where(gains, out + stream * stride, tl.load(addresses + stream, mask=inside, other=0))
        tl.store(table + 3 * stream, source, mask=inside)
        tl.store(table + 3 * stream + 2, length, mask=inside)
        tl.store(lengths + stream, length, mask=inside)


@triton.jit
def line_up(table, base, streams, times, MOST: tl.constexpr):
    """Set the targets in the table of ``_move``: consecutive, from ``base``."""
    at = base
    for i in range(times):
        stream = i * MOST + tl.arange(0, MOST)
        length = tl.load(table + 3 * stream + 2, mask=stream < streams, other=0)
        tl.store(table + 3 * stream + 1, at + tl.cumsum(length, 0) - length, mask=stream < streams)
        at += tl.sum(length)


@triton.jit
def pack7(table, SPAN: tl.constexpr):
    """Drop the lowest bit of each byte. A row: address of the plane, address of the result, groups of 8 bytes."""
    row = table + tl.program_id(1) * 3
    groups = tl.load(row + 2)
    j = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = j < groups
    plane = tl.load(row).to(tl.pointer_type(tl.uint8))
    out = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    x = tl.zeros((SPAN,), tl.int64)
    for t in tl.static_range(8):
        byte = tl.load(plane + 8 * j + t, mask=inside, other=0).to(tl.int64)
        x = (x << 7) | (byte >> 1)
    for t in tl.static_range(7):
        tl.store(out + 7 * j + t, ((x >> (48 - 8 * t)) & 255).to(tl.uint8), mask=inside)


@triton.jit
def unpack7(table, SPAN: tl.constexpr):
    """Invert ``pack7``. A row: address of the packed bytes, address of the plane, groups of 7 bytes."""
    row = table + tl.program_id(1) * 3
    groups = tl.load(row + 2)
    j = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = j < groups
    packed = tl.load(row).to(tl.pointer_type(tl.uint8))
    plane = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    x = tl.zeros((SPAN,), tl.int64)
    for t in tl.static_range(7):
        byte = tl.load(packed + 7 * j + t, mask=inside, other=0).to(tl.int64)
        x = (x << 8) | byte
    for t in tl.static_range(8):
        tl.store(plane + 8 * j + t, (((x >> (49 - 7 * t)) & 127) << 1).to(tl.uint8), mask=inside)
