"""Runs the Deflate coder of the GPU and its decoder on streams: on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from helpers.plane_streams import STREAM
from raystow.workers.gpu.kernels.deflate_kernels import Deflate

FILLED = 0xAB
_MARGIN = 32  # bytes around the memory for a decoded stream


def encoded(streams: Iterable[torch.Tensor], device: str = "cpu") -> list[bytes]:
    """Return the coded streams, without the rest of the memory of one that is not coded."""
    coder, sources = Deflate(), [stream.to(device) for stream in streams]
    n = len(sources)
    out = torch.full((n, coder.stride), FILLED, dtype=torch.uint8, device=device)
    places = torch.tensor([[one.data_ptr() for one in sources], [len(one) for one in sources]], device=device)
    targets = out.data_ptr() + torch.arange(n, device=device) * coder.stride
    sizes, status = torch.zeros(n, dtype=torch.int64, device=device), torch.ones(n, dtype=torch.int32, device=device)
    scratch = torch.empty(coder.coding_scratch(n), dtype=torch.uint8, device=device)
    coder.compress(*places, targets, sizes, scratch=scratch, status=status)
    assert not status.any()
    return [row[:size].numpy().tobytes() for row, size in zip(out.cpu(), sizes.tolist(), strict=True)]


def decoded(
    streams: Sequence[bytes], sizes: Sequence[int], *, shift: int = 0, device: str = "cpu"
) -> tuple[list[int], list[bytes]]:
    """Return the status and the bytes of each stream; check that the decoder writes nothing outside the memory for them.

    Args:
        sizes: The bytes that each stream should decode to.
        shift: Added to the address of each stream.
    """
    coder, n, room = Deflate(), len(streams), STREAM + 2 * _MARGIN
    padded = [bytes(shift) + stream + bytes(-len(stream) % 8 + 16) for stream in streams]
    memory = torch.frombuffer(bytearray(b"".join(padded)), dtype=torch.uint8).clone().to(device)
    starts = torch.tensor([0, *[len(one) for one in padded[:-1]]]).cumsum(0) + shift
    out = torch.full((n, room), FILLED, dtype=torch.uint8, device=device)
    targets = out.data_ptr() + torch.arange(n) * room + _MARGIN
    lengths = torch.tensor([len(one) for one in streams])
    table = torch.stack([memory.data_ptr() + starts, lengths, targets, torch.tensor(sizes)]).to(device)
    made, status = torch.zeros(n, dtype=torch.int64, device=device), torch.full((n,), 7, dtype=torch.int32, device=device)
    scratch = torch.full((coder.decoding_scratch(n),), FILLED, dtype=torch.uint8, device=device)
    coder.decompress(*table, decoded=made, scratch=scratch, status=status)
    rows = out.cpu()
    for row, size in zip(rows, sizes, strict=True):
        assert (row[:_MARGIN] == FILLED).all()
        assert (row[_MARGIN + size :] == FILLED).all()
    return status.tolist(), [row[_MARGIN:][:size].numpy().tobytes() for row, size in zip(rows, made.tolist(), strict=True)]
