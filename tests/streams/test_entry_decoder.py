"""A simulated GPU decodes recorded tensors of journal entries, in many orders of its streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.journal_port import MemorySink
from msgspec.structs import replace

from raystow.orchestrator.journal import entry_file
from raystow.orchestrator.journal.entry_decoder import EntryDecoder
from raystow.orchestrator.journal.gradient_coding import TensorEncoder
from raystow.storage.coding import chunk
from raystow.storage.coding.kernels import Bytes
from raystow.storage.errors import Damaged
from raystow.workers.protocol.messages import EntryHeader, EntryInfo, Generation, OptimizerStep, RecordedTensor
from streams.decoder_run import decoding
from streams.device import SEEDS
from streams.encoder_run import HERE, weights


def values() -> list[torch.Tensor]:
    """Return tensors of each kind of record and each word width."""
    torch.manual_seed(1)
    exact = weights(12_000, torch.bfloat16).to(torch.float32)
    return [
        *(exact, exact * np.float32(0.7310586), weights(9_000).reshape(90, 100), torch.full((8_000,), float("nan"))),
        *(weights(9_000, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
        *(torch.arange(20_000).to(torch.int8), torch.complex(weights(3_000, torch.float64), weights(3_000, torch.float64))),
    ]


def entry(tensors: list[torch.Tensor]) -> tuple[list[RecordedTensor], Bytes]:
    """Return the records of the tensors in a journal entry, and the entry's bytes. Each tensor has several parts."""
    sink = MemorySink()
    recorded = [TensorEncoder(part=8 << 10).encode(tensor, sink.copy) for tensor in tensors]
    assert {one.kind for one in recorded} == {"plain", "bfloat16", "scaled"}
    assert min(len(one.parts) for one in recorded) > 1
    info = EntryInfo("r", 0, 1, 1, 0, (Generation("g", 0),), 0)
    step = OptimizerStep(0, (), tuple(recorded), "")
    header = EntryHeader(info, b"", (step,), (), "", "", (), b"", b"", False, ())
    end, _ = entry_file.end_of(header)
    sink.copy(end)
    parsed = entry_file.parse(replace(info, size=len(sink.content)), memoryview(sink.content))
    return entry_file.tensors_of(parsed.header), parsed.data


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("seed", SEEDS)
def test_recorded_tensors_are_decoded_bit_for_bit(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Two entries are decoded in the same lanes."""
    tensors, decoder = values(), EntryDecoder()
    stored = entry(tensors)
    with decoding(seed):
        for _ in range(2):
            found = list(decoder.on_gpu(HERE, *stored))
            assert [bits(one) for one in found] == [bits(tensor) for tensor in tensors]
            assert [(one.dtype, one.shape) for one in found] == [(tensor.dtype, tensor.shape) for tensor in tensors]
        decoder.close()
    assert "decoded on the CPU" not in caplog.text


@pytest.mark.parametrize("change", [{"digest": 1}, {"stored_digest": bytes(32)}])
def test_a_wrong_digest_raises_damaged(change: dict[str, object]) -> None:
    (*others, last), data = entry(values())
    *parts, part = last.parts
    wrong = replace(last, parts=(*parts, replace(part, **change)))
    decoder = EntryDecoder()
    with decoding(SEEDS[0]), pytest.raises(Damaged, match="digest"):
        list(decoder.on_gpu(HERE, [*others, wrong], data))


def test_a_codec_that_the_gpu_lacks_is_decoded_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(chunk.STREAMED, "new", chunk.STREAMED[chunk.ZSTD])
    tensors, decoder = values(), EntryDecoder()
    (first, *others), data = entry(tensors)
    parts = [replace(one, codecs=tuple("new" if of == chunk.ZSTD else of for of in one.codecs)) for one in first.parts]
    assert {codec for part in parts for codec in part.codecs} == {"raw", "new"}
    with decoding(SEEDS[0]):
        found = list(decoder.on_gpu(HERE, [replace(first, parts=tuple(parts)), *others], data))
        assert [bits(one) for one in found] == [bits(tensor) for tensor in tensors]
        decoder.close()
    assert "decoded on the CPU" in caplog.text
