"""The encoder over streams that go on as late as they may: what arrives is what was there before, in whatever order."""

from __future__ import annotations

import types
import zlib

import numpy as np
import pytest
import torch
from device import SEEDS, Device
from encoder_run import HERE, Follower, Receiver, Source, all_sources, encode, small_encoder, streams, weights
from module_mutants import rewritten

from raystow.storage.coding.chunk import DEFLATE, RAW
from raystow.storage.coding.digest import raw_digest
from raystow.storage.errors import RaystowError
from raystow.workers.gpu.encode import encoder
from raystow.workers.gpu.encode.derived_check import Following, Lookout

seeds = pytest.mark.parametrize("gpu", SEEDS, indirect=True)


@seeds
@pytest.mark.parametrize(("codec", "urgent"), [(DEFLATE, False), (DEFLATE, True), (None, False)])
def test_what_arrives_is_what_was_there_before_it_was_read(gpu: Device, codec: str | None, urgent: bool) -> None:
    """Twice: the second time all is worked out. Memory and ring hold a part of it."""
    receiver = Receiver(slots=16)
    encoder, sources = small_encoder(codec, receiver), list(all_sources())
    for _ in range(2):
        for source, fresh in zip(sources, all_sources(), strict=True):
            source.tensor.copy_(fresh.tensor)
        wanted = {source.name: source.bytes for source in sources}
        receiver.found.clear()
        encode(gpu, encoder, receiver, sources, urgent=lambda: urgent)
        assert receiver.found == wanted
    program = encoder.program
    assert program is not None
    assert any(batch.after for batch in program.batches)
    if codec:
        assert any(batch.after_group for batch in program.batches)
        assert receiver.chunks["m0.square"].coding.codecs == ("pack7", RAW, RAW, DEFLATE)
        assert receiver.chunks["any bits"].coding.codecs == (RAW,) * 4
    encoder.close()


PLANTED = {
    "an event before what it stands for": (
        "told = self.found.tell(batch)\n            self._reads.append(ReadBatch(number, batch, stream.record_event()",
        "at = stream.record_event(); told = self.found.tell(batch)\n            self._reads.append(ReadBatch(number, batch, at",
    ),
    "memory that is not free yet": ("stream.wait_event(self._left[batch.after - 1])", "pass"),
    "tensors that are read still": ("reading.read.synchronize()", "pass"),
    "a copy that has not arrived": ("        event.synchronize()\n        left()", "        left()"),
    "planes that are being packed": ("self._leaving.wait_event(packed)", "pass"),
    "samples that were not taken yet": ("self._hasty.wait_event(sampled)", "pass"),
    "streams that are being coded": ("coding.coded.synchronize()", "pass"),
}
"""What is taken to be done and is not, by what the encoder's text says, and could say."""


def comes_back(module: types.ModuleType, seed: int) -> bool:
    """Whether its encoder saves what there is, and says so."""
    with streams(seed) as gpu:
        module.coder = encoder.coder  # type: ignore[attr-defined]
        receiver, sources = Receiver(slots=16), list(all_sources())
        wanted = {source.name: source.bytes for source in sources}
        made = small_encoder(DEFLATE, receiver, of=module.Encoder)
        try:
            encode(gpu, made, receiver, sources, urgent=lambda: seed % 2 == 0)
        except (RaystowError, RuntimeError, AssertionError, ValueError, zlib.error):
            return False
        return receiver.found == wanted


@pytest.mark.parametrize("bug", PLANTED)
def test_what_is_not_waited_for_is_found(bug: str) -> None:
    module = rewritten(encoder, *PLANTED[bug])
    assert not all(comes_back(module, seed) for seed in range(12))


def test_what_is_waited_for_is_not() -> None:
    assert comes_back(rewritten(encoder, "coding.coded.synchronize()", "coding.coded.synchronize()"), 0)


@seeds
def test_what_follows_is_told_while_it_is_read(gpu: Device) -> None:
    receiver = Receiver(slots=16)
    encoder = small_encoder(DEFLATE, receiver)
    masters = [Source(f"{name}.master", weights(15_000), followed="bfloat16") for name in ("a", "b", "nan")]
    masters[2].tensor[77] = torch.nan
    other = Source("other", weights(9_000))
    followers = [Follower(Source(one.name.split(".")[0], one.tensor.bfloat16()), one) for one in masters]
    followers[1].piece.tensor[5] += 1
    followers.append(Follower(Source("copy", other.tensor.clone()), other))
    followers.append(Follower(Source("half", other.tensor.half()), other))  # which is read for that
    digests = {one.piece.name: raw_digest(np.frombuffer(one.piece.bytes, np.uint8)) for one in followers}
    following = list[Following]()

    def look() -> None:
        following.append(Lookout(HERE, followers, encoder).look(after=gpu.default.record_event()))

    strays = list[str]()

    def read() -> None:
        strays.extend(one.piece.name for one in following[0].strays)
        for one in (*masters, other, *(one.piece for one in followers)):
            one.tensor.fill_(0.5)

    encode(gpu, encoder, receiver, [*masters, other], meanwhile=look, on_read=read)
    assert sorted(strays) == ["b", "nan"]
    assert {one.info.name: one.digest for one in following[0].derived} == {name: digests[name] for name in ("a", "copy", "half")}
