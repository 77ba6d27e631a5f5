"""Encoding in either process without a GPU: memory is freed, and not before the device has finished."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.replaced_parts import replace_parts

from raystow.storage.coding.chunk import RAW
from raystow.storage.errors import ClusterError
from raystow.workers.gpu.encode import encoder
from raystow.workers.gpu.encode_request import EncodeRequest
from raystow.workers.gpu.gpu_encoder import GpuEncoder
from raystow.workers.gpu.node_mode import node_encoder
from raystow.workers.gpu.node_mode.node_encoder import NodeEncoder
from raystow.workers.gpu.node_mode.remote_encoder import RemoteEncoder
from raystow.workers.protocol.messages import DeviceOpened, OpenDevice
from raystow.workers.shm.ring import Ring


class Cuda:
    """Replaces ``torch.cuda`` and the rings on the device. ``done`` names calls in their order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def create(self, device: int) -> SimpleNamespace:
        name = f"ring {sum(one.startswith('allocate') for one in self.done)}"
        self.done.append(f"allocate {name}")
        close = lambda: self.done.append(f"free {name}")  # noqa: E731
        return SimpleNamespace(index=0, sign=lambda: None, handle=lambda: name, slots=4, slot_size=64, close=close)

    def synchronize(self, device: int) -> None:
        self.done.append("synchronize")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    parts: list[tuple[object, str, object]] = [
        (node_encoder, "_index", lambda uuid: 0),
        (node_encoder.DeviceRing, "create", made.create),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "device", contextlib.nullcontext),
        (torch.cuda, "stream", contextlib.nullcontext),
        (torch.cuda, "synchronize", made.synchronize),
    ]
    replace_parts(monkeypatch, parts)
    return made


def test_a_ring_that_is_opened_again_is_freed_first(cuda: Cuda) -> None:
    sent: list[Any] = []
    encoder = NodeEncoder(SimpleNamespace(), 0, sent.append)  # type: ignore[arg-type]
    for _ in range(2):
        encoder.ask(OpenDevice("GPU-1", RAW))
    encoder.close()
    assert [answer.handle for answer in sent if isinstance(answer, DeviceOpened)] == ["ring 0", "ring 1"]
    assert cuda.done == ["allocate ring 0", "free ring 0", "allocate ring 1", "synchronize", "free ring 1"]


def failing(*arguments: object) -> None:
    raise RuntimeError("failed")


@pytest.mark.parametrize("part", ["check", "copy"])
def test_an_error_waits_for_all_streams_of_the_device(part: str, cuda: Cuda) -> None:
    encoder: Any = RemoteEncoder(RAW, send=failing, receive=failing, lend=failing)  # type: ignore[arg-type]
    stream = SimpleNamespace(wait_event=failing, synchronize=lambda: cuda.done.append("one stream"))
    encoder._mapped[0] = SimpleNamespace(stream=stream, ring=None)
    request: Any = EncodeRequest((), None, failing, meanwhile=failing if part == "check" else lambda: None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="failed"):
        encoder.encode(0, request, failing)
    assert "synchronize" in cuda.done


def test_an_error_without_changed_chunks_waits_too(cuda: Cuda) -> None:
    """The check of derived chunks still writes to pinned memory that the error frees."""
    encoder = GpuEncoder(Ring.create(1 << 20), RAW, take=lambda: None, release=failing)
    request: Any = EncodeRequest((), None, failing, meanwhile=failing)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="failed"):
        encoder.encode(0, request, failing)
    assert cuda.done == ["synchronize"]


def test_a_full_device_is_an_error_with_a_remedy(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    replace_parts(monkeypatch, [(encoder, "EncoderStreams", lambda *arguments: None), (encoder, "EncoderMemory", full)])
    ring: Any = SimpleNamespace(capacity=1 << 30)
    with pytest.raises(ClusterError, match=r"cuda:1: .* 1440 MiB .*CUDA out of memory \(leave .*Compression"):
        encoder.Encoder(torch.device("cuda", 1), None, ring)
