"""Triton kernels that move bytes on the GPU: copy, concatenate, pack, and transfer small results to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..kernel_args import ANYWHERE, Table

_SPAN = 16384  # bytes that one program moves


@triton.jit(do_not_specialize=ANYWHERE)
def _move(table, SPAN: tl.constexpr):
    row = table + tl.program_id(1) * 3
    size = tl.load(row + 2)
    start = tl.program_id(0).to(tl.int64) * SPAN
    if start < size:
        source = tl.load(row).to(tl.pointer_type(tl.uint8))
        target = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
        for i in tl.static_range(SPAN // 4096):
            at = start + i * 4096 + tl.arange(0, 4096)
            tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


@triton.jit(do_not_specialize=ANYWHERE)
def _tell(source, target, n, MOST: tl.constexpr):
    at = tl.program_id(0) * MOST + tl.arange(0, MOST)
    tl.store(target.to(tl.pointer_type(tl.int64)) + at, tl.load(source + at, mask=at < n, other=0), mask=at < n)


@triton.jit(do_not_specialize=ANYWHERE)
def _choose(owners, addresses, planes, out, sizes, table, lengths, times, STRIDE: tl.constexpr, MOST: tl.constexpr):
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
        source = tl.where(gains, out + stream * STRIDE, tl.load(addresses + stream, mask=inside, other=0))
        tl.store(table + 3 * stream, source, mask=inside)
        tl.store(table + 3 * stream + 2, length, mask=inside)
        tl.store(lengths + stream, length, mask=inside)


@triton.jit(do_not_specialize=ANYWHERE)
def _line_up(table, base, streams, times, MOST: tl.constexpr):
    """Set the targets in the table of ``_move``: consecutive, from ``base``."""
    at = base
    for i in range(times):
        stream = i * MOST + tl.arange(0, MOST)
        length = tl.load(table + 3 * stream + 2, mask=stream < streams, other=0)
        tl.store(table + 3 * stream + 1, at + tl.cumsum(length, 0) - length, mask=stream < streams)
        at += tl.sum(length)


@triton.jit(do_not_specialize=ANYWHERE)
def _pack7(table, SPAN: tl.constexpr):
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


@triton.jit(do_not_specialize=ANYWHERE)
def _unpack7(table, SPAN: tl.constexpr):
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


def tell(found: torch.Tensor, told: torch.Tensor) -> None:
    """Copy ``found`` from the device to ``told`` in pinned host memory (both int64, contiguous), on the current stream.

    A kernel writes it: an ordinary copy would wait for all large copies that were enqueued before on any stream, since there is
    one copy engine for that direction.
    """
    if n := found.numel():
        _tell[(triton.cdiv(n, 1024),)](found, told.data_ptr(), n, MOST=1024)


def to_host(found: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned host memory (see ``tell``), complete once the current stream has executed it."""
    told = torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
    tell(found, told)
    return told


def move(table: Table, largest: int) -> None:
    """Copy bytes. ``table``: int64 [pieces, 3], source address, target address, bytes; ``largest``: the most bytes of a piece."""
    if len(table):
        _move[(max(1, triton.cdiv(largest, _SPAN)), len(table))](table, SPAN=_SPAN)


@dataclass(frozen=True)
class CodedStreams:
    """Coded streams as a coder wrote them: every ``stride`` bytes in ``memory``, each of ``sizes`` (int64 [streams]) bytes."""

    memory: torch.Tensor
    stride: int
    sizes: torch.Tensor


def condense(
    owners: torch.Tensor, cuts: torch.Tensor, streams: CodedStreams, base: int, *, largest: int, lengths: torch.Tensor
) -> None:
    """Concatenate the streams of some planes, without waiting for their sizes on the host. A plane that coding did not make
    smaller is copied raw.

    Args:
        owners: int64 [planes + 1, 2], the number of each plane's first stream and its bytes; the last row has the number of
            streams.
        cuts: int64 [2, streams], address and bytes of each stream before coding.
        streams: The coded streams.
        base: The address of the result.
        largest: The largest number of streams of a plane.
        lengths: int64 [streams], receives the bytes of each stream in the result.
    """
    addresses, planes = cuts
    table = torch.empty((len(addresses), 3), dtype=torch.int64, device=cuts.device)
    out, stride = streams.memory.data_ptr(), streams.stride
    times = triton.cdiv(largest, 256)
    _choose[(len(owners) - 1,)](owners, addresses, planes, out, streams.sizes, table, lengths, times, STRIDE=stride, MOST=256)
    _line_up[(1,)](table, base, len(table), triton.cdiv(len(table), 1024), MOST=1024)
    move(table, stride)


def pack7(table: torch.Tensor, largest: int) -> None:
    """Compute ``storage.coding.kernels.pack7`` of each row: address of the plane, address of the result, groups of 8 bytes."""
    if len(table):
        _pack7[(max(1, triton.cdiv(largest, 1024)), len(table))](table, SPAN=1024)


def unpack7(table: Table, largest: int) -> None:
    """Invert ``pack7``. Each row: address of the packed bytes, address of the plane, groups of 7 bytes."""
    if len(table):
        _unpack7[(max(1, triton.cdiv(largest, 1024)), len(table))](table, SPAN=1024)
