"""What a training process hears of the version that it may store differences to, and how long it waits for that."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from raystow.storage.coding.chunk import Coding, packed
from raystow.storage.format.manifest import Chunk, Fragment
from raystow.workers.ipc.offers import Offers

BYTES = np.arange(256, dtype=np.uint8)
CODING = Coding(True, True, ("raw", "raw"), (10, 10))
CHUNK = Chunk("t", '["t"]', "tensor", "bfloat16", (10,), (0,), (10,), 0, "weights", 2, 30, CODING, 1, bytes(32))


def calm() -> bool:
    return False


def memory(content: bytes) -> int:
    descriptor = os.memfd_create("pack")
    os.write(descriptor, content)
    return descriptor


def offer(offers: Offers, id: int, *chunks: Chunk) -> None:
    descriptor = memory(BYTES.tobytes())
    offers.hear({"lent": ["weights", 2], "nbytes": BYTES.size, "loan": id}, descriptor)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    offers.hear({"offer": id, "fragment": Fragment(0, chunks, ()).dump(), "starts": [-1] * len(chunks)}, None)


def test_what_is_named_is_what_was_offered() -> None:
    offers = Offers()
    elsewhere, outside = replace(CHUNK, name="not lent", pack=3), replace(CHUNK, name="not in it", start=240)
    offer(offers, 7, CHUNK, elsewhere, outside)
    offers.hear({"save": 1, "named": 7}, None)
    found = offers.of(1)(0, calm)
    assert found is not None
    assert found.id == 7
    assert found.chunks.keys() == {("t", ((0,), (10,)))}
    (one,) = found.chunks.values()
    assert one.chunk == CHUNK
    assert [part.tolist() for part in one.parts] == [list(range(30, 50))]
    assert not one.parts[0].flags.writeable
    assert offers.of(1)(0, calm) is found, "another device asks as well"


def test_what_nothing_is_named_for_is_let_go() -> None:
    offers = Offers()
    offer(offers, 7, CHUNK)
    offers.hear({"save": 1, "named": 7}, None)
    found = offers.of(1)(0, calm)
    assert found is not None
    parts = [part for one in found.chunks.values() for part in one.parts]
    offers.hear({"save": 2, "named": 0}, None)
    assert offers.of(2)(0, calm) is None
    del found
    assert offers.returned() == [], "someone looks at it still"
    parts.clear()
    assert offers.returned() == [7]
    assert offers.returned() == [], "it was said"
    offers.hear({"save": 3, "named": 7}, None)
    assert offers.of(3)(0, calm) is None


def test_a_name_that_comes_late_costs_one_save_its_differences(caplog: pytest.LogCaptureFixture) -> None:
    offers = Offers()
    offer(offers, 7, CHUNK)
    with caplog.at_level(logging.INFO, "raystow"):
        assert offers.of(1)(0.01, calm) is None
    assert "save 1: no version was named yet (in 0.01 seconds)" in caplog.text
    offers.hear({"save": 1, "named": 7}, None)
    offers.hear({"save": 2, "named": 7}, None)
    assert offers.of(2)(0, calm) is not None


@pytest.mark.parametrize("heard", ["named", "lost"])
def test_who_waits_goes_on_when_something_is_heard(heard: str) -> None:
    offers, found = Offers(), list[object]()
    offer(offers, 7, CHUNK)
    waiting = threading.Thread(target=lambda: found.append(offers.of(5)(60, calm)))
    waiting.start()
    if heard == "named":
        offers.hear({"save": 5, "named": 7}, None)
    else:
        offers.lost()
    waiting.join(30)
    assert [one is not None for one in found] == [heard == "named"]


def test_a_pack_that_cannot_be_mapped_is_not_offered(caplog: pytest.LogCaptureFixture) -> None:
    offers = Offers()
    offers.hear({"lent": ["weights", 2], "nbytes": 10, "loan": 0}, None)
    offers.hear({"offer": 7, "fragment": Fragment(0, (CHUNK,), ()).dump(), "starts": [-1]}, None)
    offers.hear({"save": 1, "named": 7}, None)
    found = offers.of(1)(0, calm)
    assert found is not None
    assert not found.chunks
    assert "weights-2 are stored whole: it cannot be mapped" in caplog.text
    assert offers.returned() == [0]


def test_rows_that_make_no_sense_offer_nothing(caplog: pytest.LogCaptureFixture) -> None:
    offers = Offers()
    offers.hear({"offer": 7, "fragment": b"no Parquet", "starts": []}, None)
    offers.hear({"save": 1, "named": 7}, None)
    found = offers.of(1)(0, calm)
    assert found is not None
    assert not caplog.text, "nothing is parsed before someone asks"
    assert not found.chunks
    assert "stored whole" in caplog.text


def test_nobody_who_is_in_a_hurry_waits_for_a_name(caplog: pytest.LogCaptureFixture) -> None:
    offers, hurry = Offers(), threading.Event()
    offer(offers, 7, CHUNK)
    threading.Timer(0.05, hurry.set).start()
    with caplog.at_level(logging.INFO, "raystow"):
        assert offers.of(1)(3600, hurry.is_set) is None
    assert "save 1: no version was named yet (the training waits)" in caplog.text
    offers.hear({"save": 2, "named": 7}, None)
    assert offers.of(2)(3600, hurry.is_set) is not None, "what was named is there at once"


def test_no_name_is_waited_for_in_a_save_that_nobody_expects_to_differ(caplog: pytest.LogCaptureFixture) -> None:
    offers = Offers()
    offer(offers, 7, CHUNK)
    with caplog.at_level(logging.INFO, "raystow"):
        assert offers.of(1, surely=False)(3600, calm) is None
    assert not caplog.text, "that is how most saves are"
    offers.hear({"save": 2, "named": 7}, None)
    assert offers.of(2, surely=False)(3600, calm) is not None, "what was named is there at once"
    offers.expected = True
    late = threading.Timer(0.05, offers.hear, ({"save": 3, "named": 7}, None))
    late.start()
    assert offers.of(3, surely=False)(3600, calm) is not None


def test_an_offer_that_comes_before_an_older_save_has_asked_is_kept_for_its_own() -> None:
    offers = Offers()
    offers.hear({"save": 1, "named": 7}, None)
    offer(offers, 8, CHUNK)
    offers.hear({"save": 2, "named": 8}, None)
    assert offers.of(1)(0, calm) is None
    found = offers.of(2)(0, calm)
    assert found is not None
    assert found.id == 8


def test_chunks_whose_planes_were_decoded_are_as_if_nothing_had_coded_them() -> None:
    """Of four planes the highest in streams, the lowest packed: stored as 1, 2, packed 0, coded 3."""
    coding = Coding(True, True, ("pack7", "raw", "raw", "deflate"), (7, 8, 8, 5), packed([5]), 16 << 10)
    chunk = replace(CHUNK, name="s", dtype="float32", shape=(8,), extent=(8,), start=100, coding=coding)
    offers = Offers()
    offers.hear({"lent": ["weights", 2], "nbytes": BYTES.size, "loan": 0}, memory(BYTES.tobytes()))
    offers.hear({"planes": True, "nbytes": 20, "loan": 1}, memory(bytes(range(200, 220))))
    offers.hear({"offer": 7, "fragment": Fragment(0, (chunk, CHUNK), ()).dump(), "starts": [9, -1]}, None)
    offers.hear({"save": 1, "named": 7}, None)
    found = offers.of(1)(0, calm)
    assert found is not None
    plain, as_it_was = found.chunks["s", chunk.box], found.chunks["t", CHUNK.box]
    assert as_it_was.chunk == CHUNK
    assert plain.chunk == replace(chunk, coding=Coding(True, True, ("pack7", "raw", "raw", "raw"), (7, 8, 8, 8), b"", 16 << 10))
    assert [part.tolist() for part in plain.parts] == [[*range(100, 116)], [*range(209, 217)], [*range(116, 123)]]


@pytest.mark.parametrize("lost", [True, False], ids=["not mapped", "too short"])
def test_planes_that_are_not_there_are_not_offered(lost: bool) -> None:
    coding = Coding(True, True, ("raw", "deflate"), (10, 5), packed([5]), 16 << 10)
    chunk, offers = replace(CHUNK, coding=coding), Offers()
    offers.hear({"lent": ["weights", 2], "nbytes": BYTES.size, "loan": 0}, memory(BYTES.tobytes()))
    offers.hear({"planes": True, "nbytes": 10, "loan": 1}, None if lost else memory(bytes(10)))
    offers.hear({"offer": 7, "fragment": Fragment(0, (chunk,), ()).dump(), "starts": [0 if lost else 1]}, None)
    offers.hear({"save": 1, "named": 7}, None)
    found = offers.of(1)(0, calm)
    assert found is None or not found.chunks
