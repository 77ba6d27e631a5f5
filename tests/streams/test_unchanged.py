"""Unchanged chunks are detected by digests with secret keys; only chunks that were equal in recent saves are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.chunk_sources import Follower, Source

from raystow.storage.coding.delta import LEAST
from raystow.storage.coding.digest import SecretKeys, digest_pair
from raystow.workers.gpu import unchanged
from raystow.workers.gpu.digests import Digests
from raystow.workers.gpu.unchanged import Remaining, UnchangedChunks
from raystow.workers.protocol.messages import BaseDigests, ChunkDigests, ComparedChunks
from streams.device import SEEDS, Device
from streams.encoder_run import HERE, weights

seeds = pytest.mark.parametrize("gpu", SEEDS, indirect=True)


KEYS = SecretKeys(bytes(range(32)))


def numbers_of(source: Source) -> tuple[int, int, int]:
    """Return the digest pair, the second number in two halves."""
    first, second = digest_pair(np.frombuffer(source.bytes, np.uint8), KEYS)
    return first, second % (1 << 64), second >> 64


@seeds
def test_the_device_and_the_host_compute_the_same_pairs(gpu: Device) -> None:
    sources = [Source("one", weights(1)), Source("transposed", weights(6_000).reshape(60, 100).t())]
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2):
        sources += [Source(f"{dtype}{n}", weights(n).to(dtype)) for n in (20, 9_000, 40_004)]  # whole words of 32 bits
    sums = Digests(sources, HERE, keys=KEYS).take()
    gpu.current.synchronize()
    sizes = np.array([source.nbytes for source in sources], np.uint64)
    found = unchanged.finish(sums.numpy().view(np.uint64), sizes)
    assert [tuple(numbers) for numbers in found.T.tolist()] == [numbers_of(source) for source in sources]


def numbers(rest: Remaining) -> list[int]:
    """Return the indices of the chunks that were compared."""
    message = rest.messages[-1]
    assert isinstance(message, ChunkDigests)
    return np.frombuffer(message.numbers, "<i8").tolist()


class Saves:
    """Saves of the same tensors, compared as in a training process. ``base`` holds the digests that a node worker keeps."""

    def __init__(self, gpu: Device, sources: list[Source], followers: list[Follower]) -> None:
        self.gpu, self.sources, self.followers = gpu, sources, followers
        self.chunks = UnchangedChunks(HERE, KEYS)
        self.base: BaseDigests | None = None

    def save(self) -> Remaining:
        rest = self.chunks.compare(self.sources, self.followers, self.base, after=self.gpu.default.record_event())
        sums = [unfinished(source) for source in rest.pieces]
        self.chunks.note(np.array(sums, np.uint64))
        return rest

    def commit(self, id: int) -> None:
        every = [*self.sources, *(follower.piece for follower in self.followers)]
        secret = [numbers_of(one)[1:] if one.nbytes >= LEAST else (0, 0) for one in every]
        self.base = BaseDigests(0, 1, id, np.array(secret, "<u8").T.tobytes())


def unfinished(source: Source) -> int:
    """Return the sum that ``finish`` turns into the digest; ``plain_sums`` replaces ``finish`` by the identity."""
    return numbers_of(source)[0]


@pytest.fixture
def plain_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``finish`` the identity for the sums of ``note``, and leave it unchanged for the sums of the device."""
    real = unchanged.finish

    def finish(total: Any, nbytes: Any) -> Any:
        return total if total.ndim == 1 else real(total, nbytes)

    monkeypatch.setattr(unchanged, "finish", finish)


@pytest.mark.parametrize("gpu", [0], indirect=True)
@pytest.mark.usefixtures("plain_sums")
def test_unchanged_chunks_are_not_stored(gpu: Device) -> None:
    frozen, trained, small = Source("frozen", weights(20_000)), Source("trained", weights(20_000)), Source("small", weights(100))
    half = Follower(Source("half", frozen.tensor.bfloat16()), frozen)
    saves = Saves(gpu, [frozen, trained, small], [half])
    first = saves.save()
    assert (first.pieces, first.followers) == (saves.sources, saves.followers), "no base is known yet"
    compared, digests = first.messages
    assert isinstance(compared, ComparedChunks)
    assert [chunk.name for chunk in compared.chunks] == ["frozen", "trained", "small", "half"]
    assert numbers(first) == [0, 1, 3], "only the large chunks are compared"
    assert not any(digests.same)
    saves.commit(1)
    trained.tensor.mul_(1.5)
    second = saves.save()
    assert [piece.name for piece in second.pieces] == ["trained", "small"]
    assert second.followers == []
    (digests,) = second.messages
    assert list(digests.same) == [1, 0, 1]
    trained.tensor.mul_(1.5)
    third = saves.save()
    assert numbers(third) == [0, 3], "changing chunks are not compared"
    assert third.pieces is second.pieces, "the encoder can reuse its plan"
    frozen.tensor[3] += 1
    fourth = saves.save()
    assert [piece.name for piece in fourth.pieces] == ["frozen", "trained", "small"]
    assert [follower.piece.name for follower in fourth.followers] == [], "the derived chunk is unchanged"
    fifth = saves.save()
    assert numbers(fifth) == [1], "only the chunk that was equal in two saves is compared"
    sixth = saves.save()
    assert numbers(sixth) == [0, 1, 3]


@pytest.mark.parametrize("gpu", [0], indirect=True)
@pytest.mark.usefixtures("plain_sums")
def test_always_changing_chunks_are_compared_in_two_saves(gpu: Device) -> None:
    sources = [Source(str(i), weights(10_000)) for i in range(3)]
    saves = Saves(gpu, sources, [])
    for number in range(4):
        rest = saves.save()
        assert bool(rest.messages) == (number < 2)
        assert rest.pieces is saves.sources
        saves.commit(number + 1)
        for source in sources:
            source.tensor.add_(1)


@pytest.mark.parametrize("gpu", [0], indirect=True)
@pytest.mark.usefixtures("plain_sums")
def test_a_base_of_other_chunks_is_ignored(gpu: Device) -> None:
    saves = Saves(gpu, [Source("a", weights(10_000))], [])
    saves.save()
    saves.commit(1)
    saves.sources = [Source("b", saves.sources[0].tensor)]
    rest = saves.save()
    assert rest.pieces is saves.sources, "the base describes other chunks"
    assert [message.serial for message in rest.messages] == [2, 2]


@pytest.mark.parametrize("gpu", [0], indirect=True)
@pytest.mark.usefixtures("plain_sums")
def test_a_failed_save_does_not_count_as_described(gpu: Device) -> None:
    """The messages of a save that has failed meanwhile are not sent."""
    saves = Saves(gpu, [Source("a", weights(10_000))], [])
    saves.chunks.compare(saves.sources, [], None, after=gpu.default.record_event())
    compared, _ = saves.save().messages
    assert isinstance(compared, ComparedChunks)
    (digests,) = saves.save().messages
    assert isinstance(digests, ChunkDigests)
