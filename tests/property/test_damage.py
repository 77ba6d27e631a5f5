"""A read of a damaged repository returns the saved bits or raises an error that names the damaged object.

``make test`` damages each kind of object in a few places, ``make soak`` in hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

import raystow
from raystow.state.shards import bits
from raystow.storage.format import keys
from raystow.storage.format.root import Root
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store

KINDS = {
    "marker": "raystow.json",
    "root": "root.json",
    "record": "version.json",
    "fragment": "tensors-00001.parquet",
    "weights": "weights-",  # the node that stores it depends on which node begins first
    "optimizer": "optimizer-",
}


def varied_state(seed: int) -> dict[str, Any]:
    """Return a state with planes raw, zstd and pack7, several streams in a plane, arrays, scalars and plain values."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(150, 110, generator=generator) * 0.02
    return {
        "model": {"w": weight, "half": weight[:40].bfloat16(), "bias": weight[0].clone(), "scale": torch.tensor(float(seed))},
        "optimizer": {"w": {"exp_avg": weight / 3, "exp_avg_sq": weight.square().bfloat16()}, "b": {"exp_avg": weight[1] * 7}},
        "data": {"order": np.arange(30_000) // (7 + seed), "none": np.empty((2, 0)), "seen": np.int64(-seed)},
        "epoch": seed,
        "note": "x" * seed,
    }


def leaves(node: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {name: node}
    return {n: leaf for key, child in node.items() for n, leaf in leaves(child, f"{name}.{key}" if name else key).items()}


def exact(value: Any) -> Any:
    """Return a form of a value that is equal only if every bit is equal."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bits(value).tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, value.tobytes()
    return type(value), value


SAVED = {
    1: {n: exact(leaf) for n, leaf in leaves(varied_state(1)).items()},
    2: {n: exact(leaf) for n, leaf in leaves(varied_state(2)).items()},
}


class SavedRepository:
    """A repository of two versions, saved by two ranks on two nodes, whose objects can be damaged and repaired."""

    def __init__(self) -> None:
        self.uri = f"memory://damage-{SYSTEM.token()}"
        with LocalCluster(self.uri, nodes=2) as cluster:
            for seed in (1, 2):
                version = cluster.save_all([varied_state(seed), varied_state(seed)], step=seed)
        self.home = keys.prefix(version.id, version.attempt)
        self.store = open_store(self.uri)
        self.objects = {info.key: self.store.get(info.key, max_bytes=1 << 30) for info in self.store.list("")}

    def key(self, kind: str) -> str:
        name = KINDS[kind]
        return name if name in self.objects else min(key for key in self.objects if key.startswith(self.home + name))

    def examine(self, key: str, damaged: bytes | None, *named: str) -> None:
        """Replace an object by ``damaged`` (delete it if None) and check that reads are exact or fail with its name."""
        try:
            if damaged is None:
                self.store.delete([key])
            else:
                self.store.put(key, [damaged])
            names = named or (key,)
            tolerated(self.restore, names)
            for name in SAVED[2]:
                tolerated(lambda name=name: self.read(name), names)
            assert not tolerated(self.verify, names), f"verify did not find the damage to {key}"
        finally:
            self.store.put(key, [self.objects[key]])

    def restore(self) -> None:
        into = varied_state(3)
        version = raystow.restore_latest(self.uri, into=into)
        assert version is not None
        assert {name: exact(leaf) for name, leaf in leaves(into).items()} == SAVED[version.id]

    def read(self, name: str) -> None:
        version = raystow.open(self.uri).latest()
        assert version is not None
        assert exact(version.read(name)) == SAVED[version.id][name]

    def verify(self) -> None:
        repository = raystow.open(self.uri)
        repository.verify(repository.latest())


def tolerated(work: Callable[[], None], names: tuple[str, ...]) -> bool:
    """Return whether the work succeeded; check that an error is a raystow error and names an object of ``names``."""
    try:
        work()
    except raystow.RaystowError as error:
        text = str(error)
    else:
        return True
    assert any(name in text for name in names), f"{text!r} does not name {names}"
    return False


@pytest.fixture(scope="module")
def target() -> Iterator[SavedRepository]:
    target = SavedRepository()
    target.restore()
    target.verify()
    for name in SAVED[2]:
        target.read(name)
    yield target
    target.restore()
    target.verify()


@pytest.fixture(scope="module")
def other() -> SavedRepository:
    return SavedRepository()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte_is_detected(target: SavedRepository, kind: str, where: float, flip: int) -> None:
    change(target, kind, where, flip)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_hundreds_of_changed_bytes_are_detected(target: SavedRepository, kind: str, where: float, flip: int) -> None:
    change(target, kind, where, flip)


def change(target: SavedRepository, kind: str, where: float, flip: int) -> None:
    """Change one byte, at the fraction ``where`` of the object's length."""
    key = target.key(kind)
    whole = target.objects[key]
    at = int(where * len(whole))
    target.examine(key, whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True))
def test_truncation_is_detected(target: SavedRepository, kind: str, where: float) -> None:
    truncate(target, kind, where)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True))
def test_hundreds_of_truncations_are_detected(target: SavedRepository, kind: str, where: float) -> None:
    truncate(target, kind, where)


def truncate(target: SavedRepository, kind: str, where: float) -> None:
    key = target.key(kind)
    target.examine(key, target.objects[key][: int(where * len(target.objects[key]))])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3, deadline=None)
@given(more=st.binary(min_size=1, max_size=200) | st.sampled_from([b"\n", b" ", b"\0", bytes(100_000)]))
def test_appended_bytes_are_detected(target: SavedRepository, kind: str, more: bytes) -> None:
    key = target.key(kind)
    target.examine(key, target.objects[key] + more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_object_is_detected(target: SavedRepository, kind: str) -> None:
    target.examine(target.key(kind), None)


@pytest.mark.parametrize("kind", KINDS)
def test_replacement_by_another_object_is_detected(target: SavedRepository, other: SavedRepository, kind: str) -> None:
    """The replacements are an object of another kind and the same object of another repository."""
    following = dict(zip(KINDS, [*KINDS][1:] + [*KINDS][:1], strict=True))
    replace(target, kind, [target.objects[target.key(following[kind])], other.objects[other.key(kind)]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_replacement_by_any_object_is_detected(target: SavedRepository, other: SavedRepository, kind: str) -> None:
    replace(target, kind, [*target.objects.values(), *other.objects.values()])


def replace(target: SavedRepository, kind: str, by: list[bytes]) -> None:
    key = target.key(kind)
    for data in by:
        if data != target.objects[key]:
            # If marker and root name two repositories, either of the two may be the wrong one.
            target.examine(key, data, *((key, keys.ROOT) if kind == "marker" else (key,)))


@pytest.mark.parametrize("kind", KINDS)
def test_two_swapped_objects_are_detected(target: SavedRepository, kind: str) -> None:
    """One object is swapped with each other object of the same kind in the repository."""
    key, name = target.key(kind), KINDS[kind].partition("-")[0]
    for neighbour, data in target.objects.items():
        if neighbour != key and neighbour.rpartition("/")[2].startswith(name):
            target.store.put(neighbour, [target.objects[key]])
            try:
                target.examine(key, data, key, neighbour)
            finally:
                target.store.put(neighbour, [target.objects[neighbour]])


@pytest.mark.parametrize("kind", ["marker", "root", "record"])
def test_the_digest_covers_every_byte_of_a_record(target: SavedRepository, kind: str) -> None:
    from raystow.storage.format import records

    key = target.key(kind)
    whole = target.objects[key]
    records.load(whole, key)
    for at in range(len(whole)):
        for flip in (1, 0x20, 0x80):
            with pytest.raises(raystow.Damaged, match=key):
                records.load(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :], key)


def test_an_older_root_is_accepted(target: SavedRepository) -> None:
    """A restored old root is outside the threat model (docs/spec/format-v1.md): the older version is read bit for bit."""
    root = Root.load(target.objects[keys.ROOT])
    older = Root(root.repository, root.epoch, root.owner, 2, "0" * 16, {}, root.versions[:1])
    target.store.put(keys.ROOT, [older.dump()])
    try:
        target.restore()
        target.verify()
        assert [version.id for version in raystow.open(target.uri).versions()] == [1]
    finally:
        target.store.put(keys.ROOT, [target.objects[keys.ROOT]])
