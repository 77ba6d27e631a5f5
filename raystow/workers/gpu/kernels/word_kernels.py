"""Kernels over words on the GPU, in Triton: the counterparts of ``storage.coding.kernels`` and ``storage.coding.digest``.

Every kernel takes a table in device memory with a row for each chunk, and works on all of them in one launch: a state has
thousands of chunks, and a launch for each would cost the training process more than the work itself.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from ....storage.coding.digest import BLOCK, SECOND_WORD_KEYS, WORD_KEYS, block_key
from ..kernel_args import ANYWHERE, Table

_SLICE = 1024  # 32-bit words: what a program takes of a digest block at a time, always with the same keys
_GROUP = 16  # digest blocks that a program goes through
_REACH = BLOCK * 4 * _GROUP  # bytes that the programs of one group cover together
_BLOCKS = 1 << 12  # digest blocks of a chunk, at most

FOUND = 5
"""Rows of what ``split`` finds."""


@triton.jit
def _rotate(v, W: tl.constexpr):
    """Words rotated left by one bit; of two bytes, two of them in an int32."""
    t = (v << 1) | ((v >> (8 * W - 1)) & 1)
    if W == 2:  # what leaves the lower half does not enter the upper one
        t = ((v << 1) & -65537) | ((v >> 15) & 0x00010001)
    return t


@triton.jit
def _rotate_back(t, W: tl.constexpr):
    """The inverse of ``_rotate``."""
    if W == 2:
        v = ((t >> 1) & 0x7FFF7FFF) | ((t << 15) & -2147450880)
    elif W == 4:
        v = ((t >> 1) & 0x7FFFFFFF) | (t << 31)
    else:
        v = ((t >> 1) & 0x7FFFFFFFFFFFFFFF) | (t << 63)
    return v


@triton.jit
def _signed(t, W: tl.constexpr):
    """The differences that ``storage.coding.kernels.subtract`` has made numbers without a sign of: 0, 1, 2 are 0, -1, 1."""
    half = (t >> 1) & (0x7FFFFFFFFFFFFFFF if W == 8 else 0x7FFFFFFF)
    return half ^ -(t & 1)


@triton.jit
def _joined(row, at, inside, W: tl.constexpr, LANES: tl.constexpr):
    """Words put together from their planes, whose addresses follow those two numbers in ``row``."""
    t = tl.zeros((LANES,), tl.int64) if W == 8 else tl.zeros((LANES,), tl.int32)
    for p in tl.static_range(W):
        byte = tl.load(tl.load(row + 2 + p).to(tl.pointer_type(tl.uint8)) + at, mask=inside, other=0)
        t = t | (byte.to(t.dtype) << (8 * p))
    return t


@triton.jit
def _rounded(x, BF16: tl.constexpr):
    """float32, as int32, rounded to bfloat16 or to float16; the result in the lower half of an int32."""
    if BF16:  # to the nearest, of two equally near ones to the even one
        made = (x + 0x7FFF + ((x >> 16) & 1)) >> 16
    else:
        made = x.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return made & 0xFFFF


@triton.jit
def _mixed(v):
    """``storage.coding.kernels.mixed`` of 32-bit words, as int64."""
    v = v ^ ((v >> 16) & 0xFFFF)
    v = v * -2048144789
    v = v ^ ((v >> 13) & 0x7FFFF)
    v = v * -1028477387
    v = v ^ ((v >> 16) & 0xFFFF)
    return v.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _total(low, high, word, lane, ITEM: tl.constexpr):
    """Sums of items over blocks, multiplied with the keys of their words in a block, and added up."""
    if ITEM == 8:
        total = tl.sum(low * tl.load(word + 2 * lane) + high * tl.load(word + 2 * lane + 1))
    else:
        total = tl.sum(low * (tl.load(word + lane * ITEM // 4) << (8 * ITEM * (lane % (4 // ITEM)))))
    return total


@triton.jit(do_not_specialize=ANYWHERE)
def _pass(
    table,
    keys,
    block_keys,
    digests,
    samples,
    odds,
    rounded_digests,
    nans,
    W: tl.constexpr,
    ROTATE: tl.constexpr,
    SPLIT: tl.constexpr,
    JOIN: tl.constexpr,
    ADD: tl.constexpr,
    ROUND: tl.constexpr,
    FOLLOWED: tl.constexpr,
    PACKED: tl.constexpr,
    SAMPLE: tl.constexpr,
    PAIR: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Digest blocks ``first`` to ``first + GROUP`` of one chunk, from each the same ``SLICE`` words of 32 bits.

    ``PACKED``: words of one or two bytes are read four or two at a time. The sum of ``word * key(block)`` is taken over the
    blocks first, and multiplied with ``key(word)`` once at the end. ``SAMPLE``: only the first slice of each block is looked at.
    ``FOLLOWED``: the digest of the words rounded to this dtype is taken as well. Two of those lie in a
    word, and two of these blocks in one block, with other keys in either half. ``PAIR``: the second number of ``digest_pair`` is
    added up as well, into ``samples``; its keys follow the others in both tables. It needs whole words of 32 bits.
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
        even = tl.zeros((LANES,), tl.int64)
        uneven = tl.zeros((LANES,), tl.int64)
        nan = tl.zeros((LANES,), tl.int32)
        for g in range(GROUP):
            block = first + g
            at = (block * BLOCK + part * SLICE).to(tl.int64) * 4 // ITEM + lane
            inside = at < n
            if ROUND != "":
                x = tl.load(tl.load(row + 2).to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
                v = _rounded(x, ROUND == "bfloat16")
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
            if FOLLOWED != "":
                half = _rounded(v, FOLLOWED == "bfloat16").to(tl.int64) * tl.load(block_keys + block // 2)
                even += tl.where(block % 2 == 0, half, 0)
                uneven += tl.where(block % 2 == 0, 0, half)
                nan = nan | ((v & 0x7FFFFFFF) > 0x7F800000).to(tl.int32)
            low += (v.to(tl.int64) & 0xFFFFFFFF) * key
            if ITEM == 8:
                high += ((v >> 32) & 0xFFFFFFFF) * key
            if PAIR:
                second_key = tl.load(block_keys + BLOCKS + block)
                second_low += _mixed(v.to(tl.int32)) * second_key
                if ITEM == 8:
                    second_high += _mixed((v >> 32).to(tl.int32)) * second_key
        word = keys + part * SLICE
        total = _total(low, high, word, lane, ITEM)
        if SAMPLE:
            tl.atomic_add(samples + chunk, total)
        else:
            tl.atomic_add(digests + chunk, total)
        if PAIR:
            tl.atomic_add(samples + chunk, _total(second_low, second_high, word + BLOCK, lane, ITEM))
        if SPLIT:
            if part == 0:
                tl.atomic_add(samples + chunk, total)
            if tl.max(odd) != 0:
                tl.store(odds + chunk, 1)
        if FOLLOWED != "":
            halves = keys + part * (SLICE // 2)
            total = _total(even, even, halves, lane, 2) + _total(uneven, uneven, halves + BLOCK // 2, lane, 2)
            tl.atomic_add(rounded_digests + chunk, total)
            if tl.max(nan) != 0:
                tl.store(nans + chunk, 1)


@triton.jit(do_not_specialize=ANYWHERE)
def _compare(table, misses, BF16: tl.constexpr, SPAN: tl.constexpr):
    """Whether words are float32 rounded to bfloat16, or to float16."""
    row = table + tl.program_id(1) * 3
    n = tl.load(row + 2)
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = at < n
    x = tl.load(tl.load(row).to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
    found = tl.load(tl.load(row + 1).to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0).to(tl.int32)
    missed = (_rounded(x, BF16) != found) | ((x & 0x7FFFFFFF) > 0x7F800000)  # nothing follows from a NaN
    if tl.max((missed & inside).to(tl.int32)) != 0:
        tl.store(misses + tl.program_id(1), 1)


@functools.cache
def _keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The digest's keys of words and of blocks, int64 on the device; behind them those of the second digest."""
    words = np.concatenate([WORD_KEYS, SECOND_WORD_KEYS])
    blocks = np.array([block_key(b, second=second) for second in (False, True) for b in range(_BLOCKS)], np.uint64)
    return torch.from_numpy(words.view(np.int64)).to(device), torch.from_numpy(blocks.view(np.int64)).to(device)


def split(
    table: torch.Tensor,
    largest: int,
    *,
    width: int,
    rotate: bool,
    packed: bool,
    results: torch.Tensor,
    followed: str = "",
) -> None:
    """Take apart the words of each chunk into its planes, on the current stream.

    ``table``: int64 [chunks, COLUMNS], see ``tables``; ``packed``: what ``can_pack`` says of it. ``largest``: bytes of the
    largest chunk. ``results``: int64 [FOUND, chunks], zeros: gets the sums of ``raw_digest`` before its last mixing, those of
    ``sample``, and 1 where the lowest bit of any rotated word is set.

    ``followed``: the words are float32; the last rows of ``results`` get the digests of
    ``coding.derived.derive`` of them in this dtype (bfloat16 or float16), and 1 where any is a NaN, from which nothing follows.
    """
    _run(table, largest, *results, W=width, ROTATE=rotate, PACKED=packed, SPLIT=True, FOLLOWED=followed)


def join(table: Table, largest: int, *, width: int, rotate: bool, packed: bool, digests: Table) -> None:
    """The inverse of ``split``; ``digests`` (int64 [chunks], zeros) gets the sums of ``raw_digest`` of the words it makes."""
    _run(table, largest, digests, W=width, ROTATE=rotate, PACKED=packed, JOIN=True)


def add(table: Table, largest: int, *, width: int, digests: Table) -> None:
    """``storage.coding.kernels.add``: the planes of each row are those of differences to the words that lie where the new ones
    go; all else as for ``join``."""
    _run(table, largest, digests, W=width, PACKED=False, JOIN=True, ADD=True)


def derive(table: Table, largest: int, *, dtype: str, digests: Table) -> None:
    """``coding.derived.derive`` of each row, whose words of ``dtype`` (bfloat16 or float16) come of the float32 ones where
    otherwise the first plane is; ``digests`` as for ``join``."""
    _run(table, largest, digests, W=2, PACKED=False, ROUND=dtype)


def digest(
    table: torch.Tensor,
    largest: int,
    *,
    width: int,
    packed: bool,
    digests: torch.Tensor,
    second: torch.Tensor | None = None,
) -> None:
    """Only the digests of ``join``, of words that are there; ``second`` gets those of ``digest_pair`` (int64 [chunks], zeros).

    Addresses and sizes must be multiples of four bytes where ``second`` is given.
    """
    assert second is None or packed or width >= 4
    _run(table, largest, digests, second, W=width, PACKED=packed, PAIR=second is not None)


def sample(table: torch.Tensor, largest: int, *, width: int, packed: bool, samples: torch.Tensor) -> None:
    """The part of each chunk's digest that comes of 4 KiB in every 64; ``samples``: int64 [chunks], zeros."""
    _run(table, largest, samples, W=width, PACKED=packed, SAMPLE=True)


def _run(
    table: Table,
    largest: int,
    sums: Table,
    samples: torch.Tensor | None = None,
    odds: torch.Tensor | None = None,
    rounded_sums: torch.Tensor | None = None,
    nans: torch.Tensor | None = None,
    *,
    W: int,
    PACKED: bool,
    ROTATE: bool = False,
    SPLIT: bool = False,
    JOIN: bool = False,
    ADD: bool = False,
    ROUND: str = "",
    FOLLOWED: str = "",
    SAMPLE: bool = False,
    PAIR: bool = False,
) -> None:
    if len(table):
        keys, block_keys = _keys(table.device)
        slices = 1 if SAMPLE else BLOCK // _SLICE
        grid = (slices * max(1, triton.cdiv(largest, _REACH)), len(table))
        _pass[grid](
            *(table, keys, block_keys, sums, sums if samples is None else samples, sums if odds is None else odds),
            *(sums if rounded_sums is None else rounded_sums, sums if nans is None else nans),
            W=W,
            ROTATE=ROTATE,
            SPLIT=SPLIT,
            JOIN=JOIN,
            ADD=ADD,
            ROUND=ROUND,
            FOLLOWED=FOLLOWED,
            PACKED=PACKED,
            SAMPLE=SAMPLE,
            PAIR=PAIR,
            SLICE=_SLICE,
            GROUP=_GROUP,
            BLOCK=BLOCK,
            BLOCKS=_BLOCKS,
        )


def compare(table: torch.Tensor, largest: int, *, dtype: str, misses: torch.Tensor) -> None:
    """``coding.derived.followed`` of each row: address of words of float32, address of those of ``dtype`` (bfloat16 or float16),
    their number; ``largest`` of these. ``misses``: int64 [rows], zeros: gets 1 where some word is not the other one rounded."""
    if len(table):
        grid = (max(1, triton.cdiv(largest, 4096)), len(table))
        _compare[grid](table, misses, BF16=dtype == "bfloat16", SPAN=4096)
