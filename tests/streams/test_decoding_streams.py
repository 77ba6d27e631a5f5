"""The decoder on simulated streams that run as late as possible: restored tensors are correct for every order of the work."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import complement, complemented, memory_repository, rows_and_pack, whole, write, write_rows
from helpers.local_cluster import LocalCluster

from raystow.storage.coding import chunk
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, StateError
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.versions.reader import PackReader, Request
from raystow.storage.versions.runs import ByteRun
from raystow.storage.versions.version import Version
from raystow.workers.gpu.decode import decoder
from streams.decoder_run import decoding
from streams.device import SEEDS
from streams.encoder_run import HERE, weights
from streams.module_mutants import rewritten

State = dict[str, torch.Tensor]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(scope="module")
def saved() -> Iterator[tuple[Version, State]]:
    """A version with chunks of all kinds: derived, packed, deltas, all widths, noise."""
    torch.manual_seed(0)
    state = {f"m{i}": weights(16_000 + 8 * i) for i in range(3)}
    state |= {f"w{i}": state[f"m{i}"].bfloat16() for i in range(3)}
    state |= {"square": weights(12_000).square(), "double": weights(4_000, torch.float64), "ints": torch.randint(0, 9, (6_000,))}
    state |= {"part": weights(18_000).reshape(150, 120), "noise": torch.randint(-(1 << 31), 1 << 31, (9_000,)).to(torch.int32)}
    with LocalCluster(f"memory://streams-{SYSTEM.token()}", codec="cpu", delta=3) as cluster:
        cluster.save(state, step=1)
        for i in range(3):
            state[f"m{i}"] *= 1 + 1e-5 * torch.randn(state[f"m{i}"].shape)
            state[f"w{i}"] = state[f"m{i}"].bfloat16()
        yield cluster.save(state, step=2), state


def restored(version: Version, state: State, made: Any) -> State:
    """Return the restored tensors; of one tensor, a part is restored."""
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    requests = []
    for name, tensor in into.items():
        words = tensor.view(WORDS[tensor.element_size()])
        box = ((0,) * tensor.dim(), tuple(tensor.shape))
        if name == "part":
            words, box = words[30:150, 7:90], ((30, 7), (120, 83))
        requests.append(Request(name, version.chunks[name], box, words))
    for tensor in into.values():
        tensor.copy_(torch.zeros_like(tensor), non_blocking=True)  # earlier work of the current stream
    reader = version.reader()
    made.fill(reader.runs(requests), reader.read, lambda nbytes: None)
    return into


def same(got: State, wanted: State) -> bool:
    cut = torch.zeros_like(wanted["part"])
    cut[30:150, 7:90] = wanted["part"][30:150, 7:90]
    return all(torch.equal(got[name], tensor) for name, tensor in (wanted | {"part": cut}).items())


@pytest.mark.parametrize("seed", SEEDS)
def test_restored_tensors_are_the_saved_ones(saved: tuple[Version, State], seed: int, caplog: pytest.LogCaptureFixture) -> None:
    version, state = saved
    codings = [chunk.coding for chunks in version.chunks.values() for chunk in chunks]
    assert any(coding.base for coding in codings)
    with decoding(seed):
        made = decoder.Decoder(HERE)
        assert same(restored(version, state, made), state)
        assert same(restored(version, state, made), state), "lanes are used again"
        made.close()
    assert "decoded on the CPU" not in caplog.text, "lanes have taken all"


def test_a_codec_that_the_gpu_lacks_is_decoded_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of chunks with a codec that only the host has, the first version has one, and the second a delta to it."""
    monkeypatch.setitem(chunk.STREAMED, "complement", complement)
    committer = Committer(memory_repository(), "me")
    random = np.random.default_rng(1)
    arrays = {name: random.normal(size=12_000).astype(np.float32) for name in ("new", "known")}
    later = {name: (one.view("u4") + random.integers(0, 2, 12_000, "u4")).view("f4") for name, one in arrays.items()}
    first = write_rows(committer, *complemented(*rows_and_pack({name: whole(one) for name, one in arrays.items()}), "new"))
    second = write(committer, {name: whole(one) for name, one in later.items()}, base=(first.id, arrays))
    assert [row.coding.base for rows in second.chunks.values() for row in rows] == [first.id] * 2
    with decoding(SEEDS[0]):
        made = decoder.Decoder(HERE)
        for version, saved in ((first, arrays), (second, later)):
            state = {name: torch.from_numpy(array) for name, array in saved.items()}
            found = restored(version, state, made)
            assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        made.close()
    assert caplog.text.count("no lane of a GPU can take 1 runs") == 2, "the other chunk is decoded in a lane"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_target_that_is_changed_while_it_is_filled_is_named(saved: tuple[Version, State], seed: int) -> None:
    """A delta is requested three times into one memory: each changes what the others are added to."""
    version, state = saved
    (row,) = version.chunks["m0"]
    assert row.coding.base is not None
    requests = [Request("m0", [row], row.box, torch.zeros_like(state["m0"]).view(torch.int32))] * 3
    reader = version.reader()
    with decoding(seed):
        made = decoder.Decoder(HERE)
        with pytest.raises(StateError, match="tensor 'm0': its memory was changed while it was filled"):
            made.fill(reader.runs(requests), reader.read, lambda nbytes: None)
        made.close()


def test_an_error_of_a_thread_that_reads_is_raised(saved: tuple[Version, State], monkeypatch: pytest.MonkeyPatch) -> None:
    read, runs = PackReader.read, itertools.count()

    def missing(self: PackReader, run: ByteRun, into: memoryview | None) -> Any:
        if next(runs) == 7:
            raise Damaged("the pack is missing", subject=run.key)
        return read(self, run, into)

    monkeypatch.setattr(PackReader, "read", missing)
    made = decoder.Decoder(HERE)
    with decoding(0) as gpu:
        with pytest.raises(Damaged, match="missing") as error:
            restored(*saved, made)
        memory = [weakref.ref(part) for lane in made.lanes for part in (lane.stored, lane.planes, lane.words)]
        made.close()
        gpu.kept.clear()
    assert error.tb  # refers to the lanes
    assert memory
    assert [part() for part in memory] == [None] * len(memory)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("raystow-read")]


PLANTED = {
    "targets that earlier work still writes": ("lane.follow()", "pass"),
    "tensors that are being made": ('and check its results."""\n        work.lane.wait()', 'and check its results."""'),
    "tables that have not come up": (
        "with torch.cuda.stream(lane.stream):\n            lane.send",
        "if lane:\n            lane.send",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_each_missing_wait_is_detected(saved: tuple[Version, State], bug: str) -> None:
    module = rewritten(decoder, *PLANTED[bug])

    def comes_back(seed: int) -> bool:
        with decoding(seed, module):
            try:
                return same(restored(*saved, module.Decoder(HERE)), saved[1])
            except (Damaged, StateError, RuntimeError, AssertionError, ValueError):
                return False

    assert not all(comes_back(seed) for seed in range(24))  # one or two find it, most often
