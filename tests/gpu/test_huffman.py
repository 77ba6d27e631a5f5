"""What the GPU's Deflate coder writes is Deflate: zlib and nvCOMP read it, whatever is coded."""

from __future__ import annotations

import zlib

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

STREAM = 16 << 10


def cases() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    bell = torch.randn(STREAM).abs().log2().floor().add(127).to(torch.uint8)  # as exponents lie
    few = torch.cat([torch.full((2**k,), k, dtype=torch.uint8) for k in range(14)])  # codes as long as there are
    return {
        "exponents": bell,
        "exponents, fewer": bell[:5003],
        "with zeros": torch.where(torch.rand(STREAM) < 0.5, bell, 0),
        "zeros": torch.zeros(STREAM, dtype=torch.uint8),
        "one byte": bell[:1],
        "the same byte": torch.full((77,), 255, dtype=torch.uint8),
        "each byte once": torch.arange(256).to(torch.uint8),
        "one of each among zeros": torch.cat([torch.arange(256).to(torch.uint8), torch.zeros(STREAM - 256, dtype=torch.uint8)]),
        "hardly anything but zeros": rare(0.03),
        "zeros in rows": torch.where(torch.arange(STREAM) // 600 % 2 == 0, bell, 0),
        **{f"runs of {n} zeros": runs(n) for n in (4, 5, 7, 8, 255, 256, 257, 260, 264, 1023, 1025)},
        "five zeros": torch.zeros(5, dtype=torch.uint8),
        "from rare to frequent": few,
        "the other way round": few.flip(0),
        "noise": torch.randint(0, 256, (STREAM,)).to(torch.uint8),
    }


def rare(share: float) -> torch.Tensor:
    """Small numbers here and there, as in the upper planes of differences."""
    some = torch.rand(STREAM).log2().neg().floor().clamp(1, 14)
    return torch.where(torch.rand(STREAM) < share, some, 0).to(torch.uint8)


def runs(length: int) -> torch.Tensor:
    """As many zeros behind one, two or three other bytes, again and again, to wherever that ends."""
    return torch.cat([torch.full((1 + length % 3,), 5), torch.zeros(length)]).to(torch.uint8).repeat(6000 // length)


def test_whatever_is_coded_is_read_by_zlib_and_by_nvcomp() -> None:
    from raystow.workers.cuda.huffman import Deflate

    coder, given = Deflate("deflate", STREAM), cases()
    n = len(given)
    sources = [stream.cuda() for stream in given.values()]
    sizes = torch.tensor([len(stream) for stream in sources], device="cuda")
    out = torch.full((n, coder.stride), 0xAB, dtype=torch.uint8, device="cuda")
    back = torch.zeros((n, STREAM), dtype=torch.uint8, device="cuda")
    at = torch.tensor([stream.data_ptr() for stream in sources], device="cuda")
    targets, returned = (rows.data_ptr() + torch.arange(n, device="cuda") * rows.shape[1] for rows in (out, back))
    coded, decoded = (torch.zeros(n, dtype=torch.int64, device="cuda") for _ in range(2))
    scratch = torch.empty(max(coder.coding_scratch(n), coder.decoding_scratch(n)), dtype=torch.uint8, device="cuda")
    status = torch.ones(n, dtype=torch.int32, device="cuda")
    coder.compress(at, sizes, targets, coded, scratch=scratch, status=status)
    assert not status.any()
    for (what, stream), row, size in zip(given.items(), out.cpu(), coded.tolist(), strict=True):
        assert zlib.decompress(row[:size].numpy().tobytes(), wbits=-15) == stream.numpy().tobytes(), what
    took = dict(zip(given, coded.tolist(), strict=True))
    assert took["exponents"] < 1.03 * by_zlib(given["exponents"], zlib.Z_HUFFMAN_ONLY)
    nearly = given["hardly anything but zeros"]
    assert took["hardly anything but zeros"] < 1.25 * by_zlib(nearly, zlib.Z_RLE) < 0.5 * by_zlib(nearly, zlib.Z_HUFFMAN_ONLY)
    assert took["zeros"] < STREAM / 128
    status.fill_(1)
    coder.decompress(targets, coded, returned, sizes, decoded=decoded, scratch=scratch, status=status)
    assert not status.any()
    assert torch.equal(decoded, sizes)
    for (what, stream), row in zip(given.items(), back.cpu(), strict=True):
        assert torch.equal(row[: len(stream)], stream), what


def by_zlib(stream: torch.Tensor, strategy: int) -> int:
    """Bytes that it takes."""
    best = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
    return len(best.compress(stream.numpy().tobytes()) + best.flush())


def test_what_would_grow_beyond_its_room_is_given_up() -> None:
    from raystow.workers.cuda import huffman

    coder = huffman.Deflate("deflate", STREAM)
    at = torch.arange(STREAM, device="cuda")
    looked_at = at % 4 == at // (4 * huffman._WORDS) % 4
    steep = torch.rand(STREAM, device="cuda").log2().neg().floor().clamp(max=14)  # zeros in half of the places, and so on
    misleading = torch.where(looked_at, steep, 14).to(torch.uint8)  # all others hold what is rarest among these
    out = torch.full((2 * coder.stride,), 0xAB, dtype=torch.uint8, device="cuda")
    places = [torch.tensor([number], device="cuda") for number in (misleading.data_ptr(), STREAM, out.data_ptr(), 0)]
    scratch = torch.empty(coder.coding_scratch(1), dtype=torch.uint8, device="cuda")
    coder.compress(*places, scratch=scratch, status=torch.ones(1, dtype=torch.int32, device="cuda"))
    assert places[3].item() > STREAM
    assert (out[coder.stride :] == 0xAB).all()
