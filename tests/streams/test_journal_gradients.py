"""Gradients in device memory are recorded exactly and digests equal those of a CPU, in any order of streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.journal_port import MemorySink
from helpers.replaced_parts import replace_parts

from raystow.orchestrator.journal.entry_encoder import CapturedEntry, EntryEncoder
from raystow.orchestrator.journal.entry_file import parse
from raystow.orchestrator.journal.gpu_gradients import GpuGradientEncoder, SharedRing
from raystow.orchestrator.journal.gradient_coding import decode
from raystow.orchestrator.journal.state_digests import whole_spans
from raystow.storage.coding.digest import raw_digest
from raystow.workers.gpu import kernel_args
from raystow.workers.gpu.kernels.library import Kernel
from raystow.workers.gpu.span_digests import span_digests
from raystow.workers.protocol.messages import EntryInfo, Generation
from streams.device import SEEDS, Device
from streams.encoder_run import HERE, KIB, MIB, weights

pytestmark = pytest.mark.parametrize("gpu", SEEDS, indirect=True)


def gradients(step: int) -> list[torch.Tensor]:
    torch.manual_seed(step)
    clipped = 0.7310586 + step / 1000
    exact = [weights(20_000 + 77 * i, torch.bfloat16).to(torch.float32) for i in range(3)]
    return [
        *(one * np.float32(clipped) for one in exact),
        weights(9_000),
        torch.zeros(12_000),
        weights(15_001, torch.bfloat16),
        weights(70),
        torch.full((8_000,), float("nan")),
        exact[0] * 0.5,
    ]


def copied(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy gradients as ``GradientBuffers`` does."""
    return [value.clone() for value in values]


def overwrite(buffers: list[torch.Tensor]) -> None:
    """Overwrite the buffers, as the next step does after the encoder released them."""
    for buffer in buffers:
        buffer.fill_(7)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_gradients_are_decoded_bit_for_bit(gpu: Device) -> None:
    """The gradients of two steps are encoded from the same memory, and then those of another GPU through the same ring."""
    sink = MemorySink(32, 64 * KIB)
    ring = SharedRing(sink.ring)
    first, other = (GpuGradientEncoder(HERE, ring, memory=24 * MIB, small=4 * KIB) for _ in range(2))
    buffers = copied(gradients(0))
    for step, encoder in ((1, first), (2, first), (2, other)):
        values = gradients(step)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        found = encoder.encode(buffers, gpu.default.record_event(), sink, lambda: overwrite(buffers))
        gpu.synchronize()
        for value, recorded in zip(values, found, strict=True):
            again = decode(recorded, np.frombuffer(sink.content, np.uint8))
            assert again is not None
            assert bits(again) == bits(value)
        kinds = [recorded.kind for recorded in found]
        assert kinds == ["scaled"] * 3 + ["plain", "zero", "plain", "plain", "plain", "bfloat16"]
        sizes = [sum(sum(part.stored) for part in recorded.parts) for recorded in found]
        assert sizes[0] < 0.75 * 2 * values[0].numel()
        sink.content = bytearray()
    first.close()
    other.close()
    ring.close()


def test_nothing_writes_to_buffers_after_an_error(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while a kernel replaces gradients in the buffers; then the next step overwrites these."""
    launch = Kernel.launch

    def failing(kernel: Kernel, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        launch(kernel, grid, *args, **constants)
        if kernel.name == "bfloat16.narrow":
            raise torch.OutOfMemoryError("CUDA out of memory")

    replace_parts(monkeypatch, [(Kernel, "launch", failing)])
    sink = MemorySink(32, 64 * KIB)
    ring = SharedRing(sink.ring)
    encoder = GpuGradientEncoder(HERE, ring, memory=24 * MIB, small=4 * KIB)
    buffers = copied(gradients(1))
    with pytest.raises(torch.OutOfMemoryError):
        encoder.encode(buffers, gpu.default.record_event(), sink, lambda: None)
    overwrite(buffers)
    gpu.synchronize()
    for buffer in buffers:
        assert bits(buffer) == bits(torch.full_like(buffer, 7))
    encoder.close()
    ring.close()


def test_buffers_are_unchanged_after_they_are_recorded(gpu: Device) -> None:
    """The values are some that the GPU encoder would replace in place, and the elements are not contiguous."""
    encoder = EntryEncoder(lambda device, ring: GpuGradientEncoder(HERE, ring, memory=24 * MIB, small=4 * KIB))
    info = EntryInfo("0" * 16, 0, 1, 1, 0, (Generation("0", 1),))
    device: Any = None  # the key of tensors that represent tensors of a GPU
    sink = MemorySink(32, 64 * KIB)
    buffer = weights(12_000, torch.bfloat16).to(torch.float32).reshape(100, 120).t()
    for expected in (["running"], []):
        captured = CapturedEntry(buffers={"running": buffer.clone()}, fresh=False, ready={device: gpu.default.record_event()})
        sink.content = bytearray()
        described = encoder.encode(captured, info, sink)
        gpu.synchronize()
        entry = parse(described, memoryview(sink.content))
        assert [name for name, _ in entry.header.buffers] == expected
        for _, recorded in entry.header.buffers:
            again = decode(recorded, entry.data)
            assert again is not None
            assert bits(again) == bits(buffer)
    encoder.close()


@pytest.mark.parametrize("rows", [kernel_args.MOST_ROWS, 2])
def test_digests_equal_those_of_a_cpu(gpu: Device, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_parts(monkeypatch, [(kernel_args, "MOST_ROWS", rows)])
    tensors = [
        weights(5_000),
        weights(3_001, torch.bfloat16),
        weights(40_000),
        weights(8_000).reshape(80, 100).t(),
        weights(99)[::2],
    ]
    pieces = [(one, first, last) for one in tensors for first, last in whole_spans(one.numel() * one.itemsize)]
    pieces += [(tensors[2], 4096, 8192), (tensors[3], 4097, 8189), (tensors[4], 98, 99)]
    with torch.cuda.stream(torch.cuda.Stream()):
        take = span_digests(HERE, pieces)
    for _ in range(2):
        found = take()()
        for (tensor, first, last), number in zip(pieces, found.tolist(), strict=True):
            assert number == raw_digest(np.frombuffer(bits(tensor), np.uint8)[first:last].copy())
        tensors[0] += 1
