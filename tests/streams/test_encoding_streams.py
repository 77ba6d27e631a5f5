"""The encoder on simulated streams that run as late as possible: the results are correct for every order of the work."""

from __future__ import annotations

import functools
import gc
import types
import zlib

import numpy as np
import pytest
import torch
from helpers.chunk_sources import Follower, HostSource, Source
from helpers.replaced_parts import replace_parts

from raystow.storage.coding.chunk import DEFLATE, RAW
from raystow.storage.coding.digest import raw_digest
from raystow.storage.errors import RaystowError, SaveFailed
from raystow.workers.gpu import uploads
from raystow.workers.gpu.encode import chunk_reader, encode_run, encoder, group_coder, host_copier, stored_hasher
from raystow.workers.gpu.encode.derived_check import DerivedCheck, DerivedChecker
from streams.device import SEEDS, Device
from streams.encoder_run import HERE, Receiver, all_sources, encode, small_encoder, streams, weights
from streams.module_mutants import rewritten

FEW = 16 << 10
"""Bytes of memory for values of leaves, less than the state needs."""

seeds = pytest.mark.parametrize("gpu", SEEDS, indirect=True)


@seeds
@pytest.mark.parametrize(("codec", "urgent"), [(DEFLATE, False), (DEFLATE, True), (None, False)])
def test_encoded_chunks_contain_the_values_before_the_read(gpu: Device, codec: str | None, urgent: bool) -> None:
    """The second save reuses the plan. Memory and ring are smaller than the state."""
    receiver = Receiver(slots=16)
    encoder, sources = small_encoder(codec, receiver), list(all_sources())
    for _ in range(2):
        for source, fresh in zip(sources, all_sources(), strict=True):
            source.tensor.copy_(fresh.tensor)
        wanted = {source.name: source.bytes for source in sources}
        receiver.found.clear()
        encode(gpu, encoder, receiver, sources, urgent=lambda: urgent)
        assert receiver.found == wanted
        assert receiver.hashed == {*wanted} - {"one", "small"}
    plan = encoder.plan
    assert plan is not None
    assert any(batch.after for batch in plan.batches)
    if codec:
        assert any(batch.after_group for batch in plan.batches)
        assert receiver.chunks["m0.square"].coding.codecs == ("pack7", RAW, RAW, DEFLATE)
        assert receiver.chunks["any bits"].coding.codecs == (RAW,) * 4
    encoder.close()


@pytest.mark.parametrize("gpu", SEEDS[:1], indirect=True)
@pytest.mark.parametrize("failing", [False, True])
def test_a_save_leaves_no_memory_to_the_garbage_collector(gpu: Device, failing: bool) -> None:
    """The failing save fails while copies to the host are pending."""
    receiver, failed = Receiver(slots=64), False
    encoder, sources = small_encoder(DEFLATE, receiver), list(all_sources())

    def fail() -> None:
        assert encoder.run is not None
        assert encoder.run.copies
        raise SaveFailed("given up")

    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        try:
            encode(gpu, encoder, receiver, sources, on_read=fail if failing else lambda: None)
        except SaveFailed:  # pytest.raises would refer to the traceback, and so to the memory
            failed = True
        gc.collect()
        left = {type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("raystow.workers.gpu.encode")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert failed == failing
    assert not left
    encoder.close()


PLANTED = {
    "an event before what it stands for": (
        chunk_reader,
        "found = self.results.to_host(batch)\n            return ReadBatch(number, batch, stream.record_event()",
        "at = stream.record_event(); found = self.results.to_host(batch)\n            return ReadBatch(number, batch, at",
    ),
    "memory that is not free yet": (encode_run, "self._copied[batch.after - 1 : batch.after] if batch.after else []", "[]"),
    "tensors that are read still": (encode_run, "for read in self._reads:\n            read.done.synchronize()", "pass"),
    "a copy that has not arrived": (encode_run, "        event.synchronize()\n        copied()", "        copied()"),
    "planes that are being packed": (host_copier, "streams.copy.wait_event(packed)", "pass"),
    "bytes that are being packed": (stored_hasher, "self._stream.wait_event(packed)", "pass"),
    "packed planes that are being hashed": (host_copier, "pack_buffers.copied(done)", "pack_buffers.copied(copied)"),
    "planes that are being hashed": (host_copier, "return done", "return copied"),
    "coded planes that are being hashed": (host_copier, "self._streams.copy.wait_event(coded.digests.done)", "pass"),
    "samples that were not taken yet": (chunk_reader, "streams.urgent.wait_event(sampled)", "pass"),
    "streams that are being coded": (group_coder, "coded.done.synchronize()", "pass"),
}
"""Missing waits: the module, its text, and the text with the bug."""


def with_bug(module: types.ModuleType, right: str, wrong: str) -> types.ModuleType:
    """Return the encoder's module with a bug in itself or in a module of its stages."""
    parts = (chunk_reader, group_coder, host_copier, stored_hasher)
    stages = {one: rewritten(one, right, wrong) if one is module else one for one in parts}
    run = rewritten(encode_run, *((right, wrong) if module is encode_run else ("class EncodeRun:", "class EncodeRun:")))
    run.ChunkReader = stages[chunk_reader].ChunkReader  # type: ignore[attr-defined]
    run.GroupCoder = stages[group_coder].GroupCoder  # type: ignore[attr-defined]
    run.StoredHasher = stages[stored_hasher].StoredHasher  # type: ignore[attr-defined]
    run.HostCopier = stages[host_copier].HostCopier  # type: ignore[attr-defined]
    made = rewritten(encoder, "class Encoder:", "class Encoder:")
    made.EncodeRun = run.EncodeRun  # type: ignore[attr-defined]
    return made


def comes_back(module: types.ModuleType, seed: int, values: int | None = None) -> bool:
    """Return whether the encoder of a module encodes the right bytes. ``values``: see ``small_encoder``."""
    with streams(seed) as gpu:
        module.coder = encoder.coder  # type: ignore[attr-defined]
        receiver, sources = Receiver(slots=16), list(all_sources())
        wanted = {source.name: source.bytes for source in sources}
        made = small_encoder(DEFLATE, receiver, of=module.Encoder, values=values)
        try:
            encode(gpu, made, receiver, sources, urgent=lambda: seed % 2 == 0)
        except (RaystowError, RuntimeError, AssertionError, ValueError, zlib.error):
            return False
        return receiver.found == wanted


@pytest.mark.parametrize("bug", PLANTED)
def test_each_missing_wait_is_detected(bug: str) -> None:
    module = with_bug(*PLANTED[bug])
    assert not all(comes_back(module, seed) for seed in range(12))


@seeds
def test_chunks_are_hashed_if_there_is_memory_for_their_leaves(gpu: Device) -> None:
    """The receiver compares every digest."""
    receiver = Receiver(slots=16)
    encoder, sources = small_encoder(DEFLATE, receiver, values=FEW), list(all_sources())
    for _ in range(2):
        encode(gpu, encoder, receiver, sources)
        for source, fresh in zip(sources, all_sources(), strict=True):
            source.tensor.copy_(fresh.tensor)
    assert receiver.found == {source.name: source.bytes for source in sources}
    assert 4 < len(receiver.hashed) < len(sources) - 2
    encoder.close()


def test_memory_for_leaves_that_is_used_too_early_is_detected() -> None:
    module = with_bug(stored_hasher, "together.after <= self._complete", "True")
    assert not all(comes_back(module, seed, FEW) for seed in range(12))


def test_the_correct_code_passes() -> None:
    same = "coded.done.synchronize()"
    module = with_bug(group_coder, same, same)
    assert all(comes_back(module, seed) for seed in range(12))


@seeds
def test_derived_chunks_are_reported_during_the_read(gpu: Device) -> None:
    receiver = Receiver(slots=16)
    encoder = small_encoder(DEFLATE, receiver)
    masters = [Source(f"{name}.master", weights(15_000)) for name in ("a", "b", "nan")]
    masters[2].tensor[77] = torch.nan
    other = Source("other", weights(9_000))
    followers = [Follower(Source(one.name.split(".")[0], one.tensor.bfloat16()), one) for one in masters]
    followers[1].piece.tensor[5] += 1
    followers.append(Follower(Source("copy", other.tensor.clone()), other))
    followers.append(Follower(Source("half", other.tensor.half()), other))
    across = Source("across", weights(6_000).reshape(60, 100).t())
    followers.append(Follower(Source("across.copy", across.tensor.clone(memory_format=torch.preserve_format)), across))
    followers.append(Follower(Source("across.other", across.tensor + 1), across))
    digests = {one.piece.name: raw_digest(np.frombuffer(one.piece.bytes, np.uint8)) for one in followers}
    check = DerivedCheck(DerivedChecker(HERE, followers))

    def look() -> None:
        check.begin(after=gpu.default.record_event())

    strays = list[str]()

    def read() -> None:
        strays.extend(one.piece.name for one in check.strays)
        for one in (*masters, other, across, *(one.piece for one in followers)):
            one.tensor.fill_(0.5)

    encode(gpu, encoder, receiver, [*masters, other, across], meanwhile=look, on_read=read)
    assert sorted(strays) == ["across.other", "b", "nan"]
    derived = {one.info.name: one.digest for one in check.derived}
    assert derived == {name: digests[name] for name in ("a", "across.copy", "copy", "half")}


@seeds
def test_chunks_in_host_memory_cross_the_link_once(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch needs more pages than the pinned buffer has. What is derived is checked with the words that are there."""
    replace_parts(monkeypatch, [(uploads, "_PAGE", 30_000), (uploads, "_PAGES", 2)])
    reads = list[str]()
    masters = [HostSource(f"{i}.master", weights(7_168 - (i % 6 == 5)), reads=reads) for i in range(20)]
    followers = [Follower(HostSource(str(i), one.tensor.bfloat16(), reads=reads), one) for i, one in enumerate(masters)]
    followers += [Follower(HostSource(f"{one.name}.copy", one.tensor.clone(), reads=reads), one) for one in masters[:15]]
    receiver, sources = Receiver(slots=16), [Source("on the device", weights(9_000)), *masters]
    encoder = small_encoder(DEFLATE, receiver)
    for _ in range(2):
        for source in sources:
            source.tensor.copy_(weights(source.tensor.numel()))
        for pair in followers:
            pair.piece.tensor.copy_(pair.source.tensor)
        for stray in (followers[17], followers[23]):
            stray.piece.tensor[99] += 1
        wanted = {source.name: source.bytes for source in sources}
        reads.clear()
        receiver.found.clear()
        check = DerivedCheck(DerivedChecker(HERE, followers, sources))
        begin = functools.partial(check.begin, after=gpu.default.record_event())
        encode(gpu, encoder, receiver, sources, meanwhile=begin, uploaded=check.uploaded)
        assert receiver.found == wanted
        strays = sorted(one.piece.name for one in check.strays)
        assert strays == ["17", "3.master.copy"]
        derived = {one.info.name: one.digest for one in check.derived}
        pieces = {one.piece.name: one.piece for one in followers if one.piece.name not in strays}
        assert derived == {name: raw_digest(np.frombuffer(piece.bytes, np.uint8)) for name, piece in pieces.items()}
        assert sorted(reads) == sorted([one.name for one in masters] + [one.piece.name for one in followers])
    encoder.close()
