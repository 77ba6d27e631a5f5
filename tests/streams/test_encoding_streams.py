"""The encoder over streams that go on as late as they may: what arrives is what was there before, in whatever order."""

from __future__ import annotations

import functools
import threading
import types
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from device import SEEDS, Device
from rewriting import rewritten
from saving import HERE, KIB, MIB, Follower, Receiver, Source, save, small_encoder, state, streams, weights

from raystow.storage.coding import kernels as on_host
from raystow.storage.coding.chunk import DEFLATE, RAW, Coding
from raystow.storage.coding.digest import raw_digest
from raystow.storage.coding.dtypes import dtype
from raystow.storage.errors import RaystowError
from raystow.workers.cuda import workbench
from raystow.workers.cuda.choice import Choice
from raystow.workers.cuda.encoding import differences, encoder
from raystow.workers.cuda.encoding.following import Following, Lookout
from raystow.workers.cuda.encoding.memory import SIZE
from raystow.workers.ipc.offers import Offer, Offered
from raystow.workers.ipc.ring import Ring

seeds = pytest.mark.parametrize("gpu", SEEDS, indirect=True)


@seeds
@pytest.mark.parametrize(("codec", "urgent"), [(DEFLATE, False), (DEFLATE, True), (None, False)])
def test_what_arrives_is_what_was_there_before_it_was_read(gpu: Device, codec: str | None, urgent: bool) -> None:
    """Twice: the second time all is worked out. Memory and ring hold a part of it."""
    receiver = Receiver(slots=16)
    encoder, sources = small_encoder(codec, receiver), list(state())
    for _ in range(2):
        for source, fresh in zip(sources, state(), strict=True):
            source.tensor.copy_(fresh.tensor)
        wanted = {source.name: source.bytes for source in sources}
        receiver.found.clear()
        save(gpu, encoder, receiver, sources, urgent=lambda: urgent)
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
        receiver, sources = Receiver(slots=16), list(state())
        wanted = {source.name: source.bytes for source in sources}
        made = small_encoder(DEFLATE, receiver, of=module.Encoder)
        try:
            save(gpu, made, receiver, sources, urgent=lambda: seed % 2 == 0)
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

    save(gpu, encoder, receiver, [*masters, other], meanwhile=look, on_read=read)
    assert sorted(strays) == ["b", "nan"]
    assert {row["name"]: row["digest"] for row in following[0].rows} == {name: digests[name] for name in ("a", "copy", "half")}


def offered(receiver: Receiver, id: int) -> Offer:
    """What was saved, as a node worker offers it that has decoded its planes."""
    chunks = {}
    for name, chunk in receiver.chunks.items():
        of, raw = dtype(chunk.dtype), np.frombuffer(receiver.found[name], np.uint8)
        planes = [np.empty(raw.size // of.width, np.uint8) for _ in range(of.width)]
        on_host.split(raw.view(on_host.WORDS[of.width]), of.rotate, tuple(planes))
        coding = Coding(True, of.rotate, (RAW,) * of.width, tuple(plane.size for plane in planes))
        chunks[name, chunk.box] = Offered(replace(chunk, coding=coding), (np.concatenate(planes),))
    offer = Offer(id, b"", {}, None, ())
    offer.__dict__["chunks"] = chunks
    return offer


@pytest.mark.parametrize("gpu", [0], indirect=True)
def test_a_name_that_nobody_waits_for_costs_one_save_its_differences_and_no_more(gpu: Device, monkeypatch: Any) -> None:
    receiver, offers, compared, looks = Receiver(slots=24), list[Offer | None](), list[Offer](), list[bool]()
    made = small_encoder(DEFLATE, receiver, differing=True)
    source = Source("master", weights(20_000))
    first, compare = source.tensor.clone(), differences.Differences._compare

    def counted(self: Any, offer: Offer, tell: Any) -> Any:
        compared.append(offer)
        return compare(self, offer, tell)

    monkeypatch.setattr(differences.Differences, "_compare", counted)
    for number, hurry in enumerate([False, False, False, True, False]):
        source.tensor.copy_(first * (1 + 1e-5 * number * torch.randn(first.shape)))
        there = source.bytes
        heard = offers[0] if offers and not hurry else None
        save(
            *(gpu, made, receiver, [source]),
            named=lambda *_, heard=heard: heard,
            meanwhile=lambda: looks.append(bool(made._reads or made._left)),
            patient=False,
            urgent=lambda hurry=hurry: hurry,
        )
        assert receiver.found["master"] == there
        assert receiver.chunks["master"].coding.base == (1 if number in (2, 4) else None)
        assert made._memory.lanes.settled == (number > 1), "when it is known to pay, and not before"
        if not offers:
            offers.append(offered(receiver, 1))
            receiver.bases = dict(receiver.found)
    assert compared == 2 * offers, "what was worked out is kept, but for the first time, which shows that it pays"
    assert looks == [True, True, True, False, False], "what can wait comes first only if there may be differences to wait for"
    made.close()


@pytest.mark.parametrize("gpu", [0], indirect=True)
def test_no_name_is_waited_for_where_the_training_waits_for_every_save(gpu: Device) -> None:
    """Nothing would be worked out for it anyway."""
    receiver, patience = Receiver(slots=24), list[float]()
    made = small_encoder(DEFLATE, receiver, differing=True)

    def named(seconds: float, hurried: Callable[[], bool]) -> None:
        patience.append(seconds)

    for waits in (False, True, False, False):
        save(gpu, made, receiver, [Source("w", weights(9_000))], named=named, patient=False, urgent=lambda waits=waits: waits)
    assert [seconds > 0 for seconds in patience] == [True, True, False, True]
    made.close()


@seeds
@pytest.mark.parametrize("waits", ["never", "before a version is named", "after some differences"])
def test_differences_are_to_what_is_named_and_no_more_are_read_once_someone_waits(
    gpu: Device, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "_TURN", 64 * KIB)
    receiver, waiting, brought = Receiver(slots=24), threading.Event(), list[int]()
    encoder = small_encoder(DEFLATE, receiver, differing=True)
    sources = [Source(f"{i}.master", weights(15_000 + i)) for i in range(5)]
    first = [source.tensor.clone() for source in sources]
    save(gpu, encoder, receiver, sources, named=lambda seconds, hurried: None, patient=False)
    offer, receiver.bases = offered(receiver, 1), dict(receiver.found)

    def changed() -> None:
        for source, before in zip(sources, first, strict=True):
            source.tensor.copy_(before * (1 + 1e-5 * torch.randn(before.shape)))

    changed()
    save(gpu, encoder, receiver, sources, named=lambda seconds, hurried: offer, patient=False)
    assert not any(chunk.coding.base for chunk in receiver.chunks.values()), "now it is known that it pays"

    def named(seconds: float, hurried: Callable[[], bool]) -> Offer | None:
        if waits == "before a version is named":
            waiting.set()
        assert hurried() == waiting.is_set()
        return offer

    def bring(number: int, *more: Any) -> Any:
        brought.append(number)
        if waits == "after some differences" and len(brought) == 3:
            waiting.set()
        return at_once(number, *more)

    at_once = encoder._bring
    monkeypatch.setattr(encoder, "_bring", bring)
    changed()
    wanted = {source.name: source.bytes for source in sources}
    save(gpu, encoder, receiver, sources, named=named, patient=False, urgent=waiting.is_set)
    assert receiver.found == wanted
    differ = sum(chunk.coding.base == 1 for chunk in receiver.chunks.values())
    assert differ == {"never": 5, "before a version is named": 0, "after some differences": differ}[waits]
    if waits == "after some differences":
        assert 0 < differ < 5
    encoder.close()


@pytest.mark.parametrize("gpu", [0], indirect=True)
@pytest.mark.parametrize(("asks", "room"), [(True, 120 * MIB), (True, 40 * KIB), (False, 120 * MIB)])
def test_samples_are_part_of_the_memory_that_an_encoder_takes(
    gpu: Device, asks: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    monkeypatch.setattr(differences, "_SAMPLES", room)

    class Small(encoder.Encoder):
        def __init__(self, _: torch.device, *of: Any, size: int) -> None:
            sizes.append(size)
            super().__init__(HERE, *of, size=24 * MIB)

    monkeypatch.setattr(workbench, "Encoder", Small)
    monkeypatch.setattr(workbench, "choose", lambda *_: Choice(DEFLATE, "it is asked for"))
    ring = Ring.create(24 * 64 * KIB, 64 * KIB)
    free = list(range(ring.slots))
    bench = workbench.Workbench(ring, "deflate", take=free.pop, release=free.append)
    sources = [*(Source(f"{i}", weights(9_000 + i)) for i in range(3)), Source("small", weights(300))]
    save = functools.partial(bench.encode, 0, sources, after=gpu.default.record_event(), on_read=list, announce=lambda _: None)
    save(named=(lambda *_: None) if asks else None)
    known = bench._encoders[0]._known
    kept = 0 if known is None else sum(samples.nbytes for samples in known._seen[0].samples)
    sampled = [] if known is None else [sources[i].name for alike in known._sampled for i in alike.numbers]
    assert sorted(sampled) == ([] if not asks else ["0", "1", "2"] if room > MIB else ["1", "2"]), "the largest"
    assert sizes == [SIZE - 3 * kept], "of the save before, the one before that, and this one"
    bench.close()
