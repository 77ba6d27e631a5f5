"""Byte streams like those of planes, as input of a Deflate coder, and their encoding by zlib."""

from __future__ import annotations

import zlib

import torch

STREAM = 16 << 10


def cases() -> dict[str, torch.Tensor]:
    """Return streams of up to ``STREAM`` bytes by name."""
    torch.manual_seed(0)
    bell = torch.randn(STREAM).abs().log2().floor().add(127).to(torch.uint8)  # distributed like exponents
    few = torch.cat([torch.full((2**k,), k, dtype=torch.uint8) for k in range(14)])  # codes of maximum length
    return {
        "exponents": bell,
        "exponents, fewer": bell[:5003],
        "with zeros": torch.where(torch.rand(STREAM) < 0.5, bell, 0),
        "zeros": torch.zeros(STREAM, dtype=torch.uint8),
        "hardly anything but zeros": _rare(0.03),
        "zeros in rows": torch.where(torch.arange(STREAM) // 600 % 2 == 0, bell, 0),
        **{f"runs of {n} zeros": _runs(n) for n in (4, 5, 7, 8, 255, 256, 257, 260, 264, 1023, 1025)},
        "five zeros": torch.zeros(5, dtype=torch.uint8),
        "one byte": bell[:1],
        "the same byte": torch.full((77,), 255, dtype=torch.uint8),
        "each byte once": torch.arange(256).to(torch.uint8),
        "one of each among zeros": torch.cat([torch.arange(256).to(torch.uint8), torch.zeros(STREAM - 256, dtype=torch.uint8)]),
        "from rare to frequent": few,
        "the other way round": few.flip(0),
        "noise": torch.randint(0, 256, (STREAM,)).to(torch.uint8),
    }


def _rare(share: float) -> torch.Tensor:
    """Return mostly zeros with a few small numbers, as in the upper planes of deltas."""
    some = torch.rand(STREAM).log2().neg().floor().clamp(1, 14)
    return torch.where(torch.rand(STREAM) < share, some, 0).to(torch.uint8)


def _runs(length: int) -> torch.Tensor:
    """Return ``length`` zeros after one, two or three other bytes, repeated."""
    return torch.cat([torch.full((1 + length % 3,), 5), torch.zeros(length)]).to(torch.uint8).repeat(6000 // length)


def check_sizes(took: dict[str, int]) -> None:
    """Assert that a coder of Huffman codes and runs of zeros produces about as many bytes as zlib."""
    given = cases()
    nearly, rows = given["hardly anything but zeros"], given["zeros in rows"]
    assert took["exponents"] < 1.03 * _by_zlib(given["exponents"], zlib.Z_HUFFMAN_ONLY)
    assert took["hardly anything but zeros"] < 1.25 * _by_zlib(nearly, zlib.Z_RLE) < 0.5 * _by_zlib(nearly, zlib.Z_HUFFMAN_ONLY)
    assert took["zeros in rows"] < 1.1 * _by_zlib(rows, zlib.Z_RLE)
    assert took["zeros"] < STREAM / 128


def _by_zlib(stream: torch.Tensor, strategy: int) -> int:
    """Return the number of bytes that zlib produces."""
    best = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
    return len(best.compress(stream.numpy().tobytes()) + best.flush())
