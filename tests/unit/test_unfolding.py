"""Planes that a node decodes for its GPUs: what is offered then leads to the same elements, and nothing is left to decode."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from formers import coded_on_cpu, coded_on_gpu, numbers, taken_apart, words
from local_cluster import LocalCluster

from raystow.storage.clock import SYSTEM
from raystow.storage.coding.chunk import ANS, PACK7, RAW, STREAMED
from raystow.storage.coding.delta import LEAST
from raystow.storage.coding.kernels import Bytes
from raystow.storage.format import keys
from raystow.storage.format.boxes import Box
from raystow.storage.format.manifest import Chunk, Fragment
from raystow.workers.cuda.bases.loads import Former as Brought
from raystow.workers.cuda.bases.loads import load
from raystow.workers.ipc.arrival import layout
from raystow.workers.ipc.offers import Offer, Offers
from raystow.workers.ipc.ring import Ring
from raystow.workers.ipc.wire import Connection
from raystow.workers.memory.former import Former
from raystow.workers.memory.memory_tier import Home, MemoryTier
from raystow.workers.port import coverage

HOME = Home("r", 3, "0123456789abcdef")
PACK = keys.pack(HOME.id, HOME.attempt, 0, "weights", 0)
MIB = 1 << 20


@dataclass
class World:
    """A version in a tier; ``raws``: its chunks' bytes, by name."""

    tier: MemoryTier
    former: Former
    rows: list[Chunk]
    raws: dict[str, Bytes]

    @property
    def wanted(self) -> set[tuple[str, Box]]:
        return {(row.name, row.box) for row in self.rows}

    def damage(self, name: str) -> None:
        (row,) = (row for row in self.rows if row.name == name)
        memory = self.tier.borrow("r", PACK)
        assert memory is not None
        os.pwrite(memory, bytes([os.pread(memory, 1, row.start + 70)[0] ^ 1]), row.start + 70)
        os.close(memory)

    def offered(self) -> Offer:
        """As a training process gets it."""
        lent, offers = self.former.lend(self.wanted), Offers()
        for of, loan in lent.packs.items():
            offers.hear({"lent": of, "nbytes": loan.nbytes, "loan": 0}, loan.descriptor)
        if lent.planes is not None:
            offers.hear({"planes": True, "nbytes": lent.planes.nbytes, "loan": 1}, lent.planes.descriptor)
        offers.hear({"offer": HOME.id, "fragment": lent.fragment, "starts": lent.starts}, None)
        offers.hear({"save": 1, "named": HOME.id}, None)
        offer = offers.of(1)(0, lambda: False)
        assert offer is not None
        return offer

    def brought(self) -> Iterator[tuple[str, bytes]]:
        """What a GPU would find, by the tables."""
        formers = [Brought(one.chunk, one.parts) for one in self.offered().chunks.values()]
        for one, planes in zip(formers, taken_apart(formers), strict=True):
            yield one.chunk.name, words(one, planes).tobytes()


def world(budget: int, of: Sequence[tuple[str, Brought, Bytes]]) -> World:
    """A version of chunks with these names, as they were coded."""
    stored = [np.concatenate(one.parts) for _, one, _ in of]
    starts = itertools.accumulate((part.size for part in stored), initial=0)
    rows = [replace(one.chunk, name=name, start=start) for (name, one, _), start in zip(of, starts, strict=False)]
    tier = MemoryTier(budget)
    tier.put(HOME, 0, PACK, list(stored))
    tier.put(HOME, 0, keys.fragment(HOME.id, HOME.attempt, 0), [Fragment(0, tuple(rows), ()).dump()])
    tier.committed(HOME)
    return World(tier, Former(tier, HOME), rows, {name: raw for name, _, raw in of})


def chunks() -> list[tuple[str, Brought, Bytes]]:
    """Of CPUs and GPUs, of all widths."""
    made = list[tuple[str, Brought, Bytes]]()
    for i, dtype in enumerate(("float8_e5m2", "bfloat16", "float32", "float64")):
        for code in (coded_on_cpu, coded_on_gpu):
            raw = numbers(dtype, 40_000, i, positive=code is coded_on_cpu)
            made.append((f"{dtype} {code.__name__}", code(dtype, raw), raw))
    return made


def test_what_is_offered_holds_no_streams_any_more_and_leads_to_the_same_elements() -> None:
    made = world(8 * MIB, chunks())
    before = made.tier.used
    assert not made.former.unfolded
    assert any(codec in STREAMED for one in made.offered().chunks.values() for codec in one.chunk.coding.codecs)
    made.former.unfold(made.wanted, threads=2)
    assert made.former.unfolded
    offer = made.offered()
    codecs = {codec for one in offer.chunks.values() for codec in one.chunk.coding.codecs}
    assert codecs == {RAW, PACK7}
    assert not load([Brought(one.chunk, one.parts) for one in offer.chunks.values()], 0).streams
    assert (
        made.tier.used - before
        == made.tier.planes(HOME)
        == sum(row.decoded // row.words.width * sum(codec in STREAMED for codec in row.coding.codecs) for row in made.rows)
    )
    assert dict(made.brought()) == {name: raw.tobytes() for name, raw in made.raws.items()}
    made.tier.close()
    assert not made.former.unfolded
    assert made.tier.used == 0


def test_planes_for_which_there_is_no_room_are_offered_as_they_are_stored(caplog: pytest.LogCaptureFixture) -> None:
    some = chunks()
    made = world(sum(one.chunk.coding.size for _, one, _ in some) + (64 << 10), some)
    made.former.unfold(made.wanted, threads=2)
    assert not made.former.unfolded
    assert "GPUs decode planes of version 3 in every save that differs from it: 0.4 MB more do not fit" in caplog.text
    assert dict(made.brought()) == {name: raw.tobytes() for name, raw in made.raws.items()}


def test_planes_that_had_to_go_are_offered_as_they_are_stored() -> None:
    some = chunks()
    made = world(2 * MIB, some)
    made.former.unfold(made.wanted, threads=2)
    assert made.former.unfolded
    made.tier.put(Home("r", 4, "f" * 16), 0, "a pack of the next one", [bytes(2 * MIB - made.tier.used + 1)])
    assert not made.former.unfolded
    assert dict(made.brought()) == {name: raw.tobytes() for name, raw in made.raws.items()}


def test_a_damaged_chunk_is_neither_decoded_nor_offered(caplog: pytest.LogCaptureFixture) -> None:
    made = world(8 * MIB, chunks())
    made.damage("float32 coded_on_gpu")
    with caplog.at_level(logging.WARNING, "raystow"):
        made.former.unfold(made.wanted, threads=2)
    assert "'float32 coded_on_gpu' is stored whole" in caplog.text
    rest = {name: raw.tobytes() for name, raw in made.raws.items() if name != "float32 coded_on_gpu"}
    assert dict(made.brought()) == rest


def test_only_what_is_wanted_and_may_serve_is_decoded() -> None:
    one, *others = chunks()
    codings = [replace(others[0][1].chunk.coding, base=2), replace(others[2][1].chunk.coding, codecs=(RAW,) * 3 + (ANS,))]
    rest = [
        (name, Brought(replace(former.chunk, coding=coding), former.parts), raw)
        for (name, former, raw), coding in zip((others[0], others[2]), codings, strict=True)
    ]
    small = numbers("bfloat16", LEAST // 2 - 8, 0, positive=False)
    made = world(8 * MIB, [*rest, ("small", coded_on_gpu("bfloat16", small), small), one, others[4]])
    made.former.unfold({key for key in made.wanted if key[0] != others[4][0]}, threads=1)
    assert made.tier.planes(HOME) == one[2].size


@dataclass
class Rank:
    """A training process as its node worker hears it, whose chunks have been coded on a GPU."""

    cluster: LocalCluster

    def __post_init__(self) -> None:
        self.connection = Connection.connect(self.cluster.address(0))
        self.connection.send({**self.cluster.hello(0, 1), "compress_in": "training"})
        answer, descriptor = self.connection.receive() or ({}, None)
        assert descriptor is not None
        self.ring, self.offers = Ring(descriptor, answer["ring"], answer["slot"]), Offers()
        self.heard = list[str]()

    def save(self, number: int, chunk: Chunk, stored: Bytes, *, delta: int = 9) -> Offer | None:
        """Save one chunk; what it might have been a difference to."""
        row = {field: getattr(chunk, field) for field in ("name", "path", "kind", "dtype", "shape", "offset", "extent", "group")}
        coding = chunk.coding
        code = [coding.planes, coding.rotated, coding.codecs, coding.stored, coding.stream, coding.base]
        said = {"coding": code, "streams": coding.streams, "digest": chunk.raw_digest, "parts": [(number % 2, 0, stored.size)]}
        shaped = layout([row], nbytes=[chunk.nbytes], streams=[0], high=[()], starts=[0], bases=[0], batches=[(0, 1, 0)])
        expected = coverage(chunk.name, chunk.dtype, chunk.shape, chunk.shape[0])
        begin = {"save": number, "step": number, "timeout": 60, "metrics": {}, "values": [], "delta": delta, "asks": True}
        self.connection.send({"begin": {**begin, "replicated": 0, "expected": expected}})
        self.connection.send({"coded": {"device": 0, "layout": shaped}})
        at = number % 2 * self.ring.slot_size
        self.ring.memory[at : at + stored.size] = stored
        self.connection.send({"chunks": [{**row, **said}]})
        self.connection.send({"filled": number % 2})
        self.connection.send({"returned": self.offers.returned()})
        self.connection.send({"end": number})
        while "done" not in (heard := self._hear()):
            assert "failed" not in heard, heard
        return self.offers.of(number)(60, lambda: False)

    def _hear(self) -> dict[str, Any]:
        message, descriptor = self.connection.receive() or ({"failed": "gone"}, None)
        if message.keys() & {"lent", "planes", "offer", "named"}:
            self.heard.append(min(message.keys() & {"lent", "planes", "offer", "named"}))
            self.offers.hear(message, descriptor)
        return message


def test_a_node_worker_decodes_a_version_when_it_is_one_and_offers_it_then() -> None:
    raw = numbers("float32", 40_000, 0, positive=False)
    of = coded_on_gpu("float32", raw)
    (stored,) = of.parts
    with LocalCluster(f"memory://unfolding-{SYSTEM.token()}", delta=9) as cluster:
        rank, tier = Rank(cluster), cluster.tier(0)
        assert rank.save(1, of.chunk, stored) is None
        until = SYSTEM.monotonic() + 60
        while not any(held.planes for held in tier.holdings(cluster.repository.id)):
            assert SYSTEM.monotonic() < until
            threading.Event().wait(0.01)
        difference = replace(of.chunk, coding=replace(of.chunk.coding, base=1, rotated=False))  # it says so
        for save in (2, 3):
            offer = rank.save(save, difference, stored)
            assert offer is not None
            (found,) = offer.chunks.values()
            assert set(found.chunk.coding.codecs) == {RAW}
            brought = Brought(found.chunk, found.parts)
            assert words(brought, taken_apart([brought])[0]).tobytes() == raw.tobytes()
        assert rank.heard == ["named", "lent", "planes", "offer", "named", "named"]
        rank.connection.close()
        rank.ring.close()


@pytest.mark.parametrize("told", [True, False], ids=["told", "gone"])
def test_what_a_node_worker_has_lent_is_on_loan_until_it_is_told_or_the_process_is_gone(told: bool) -> None:
    of = coded_on_gpu("float32", numbers("float32", 40_000, 0, positive=False))
    (stored,) = of.parts
    difference = replace(of.chunk, coding=replace(of.chunk.coding, base=1, rotated=False))  # it says so
    with LocalCluster(f"memory://loans-{SYSTEM.token()}") as cluster:
        rank, tier = Rank(cluster), cluster.tier(0)
        rank.save(1, of.chunk, stored, delta=1)
        assert rank.save(2, difference, stored, delta=1) is not None
        assert rank.save(3, of.chunk, stored, delta=1) is None  # lets go, when all of this save is staged

        def on_loan() -> int:
            return sum(memory.loans for _, memory in tier._spares._spares)

        until = SYSTEM.monotonic() + 60
        while not on_loan():  # the first version is dropped as soon as the third is one
            assert SYSTEM.monotonic() < until
            threading.Event().wait(0.01)
        if told:
            rank.save(4, of.chunk, stored, delta=0)  # for which nothing is lent
        else:
            rank.connection.close()
        while on_loan():
            assert SYSTEM.monotonic() < until
            threading.Event().wait(0.01)
        rank.connection.close()
        rank.ring.close()
