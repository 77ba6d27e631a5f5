"""Whatever happens to any object of a repository: an error that names it, or the very bits that were saved. Nothing else.

``make test`` damages each kind of object in a few places, ``make soak`` in hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_cluster import LocalCluster

import raystow
from raystow.orchestrator.save.shards import bits
from raystow.storage.clock import SYSTEM
from raystow.storage.format import keys
from raystow.storage.format.root import Root
from raystow.storage.stores import open_store

KINDS = {
    "marker": "raystow.json",
    "root": "root.json",
    "record": "version.json",
    "fragment": "tensors-00001.parquet",
    "weights": "weights-",  # which node stores it depends on which begins first
    "optimizer": "optimizer-",
}


def varied_state(seed: int) -> dict[str, Any]:
    """Planes raw, zstd and pack7, several streams in a plane, arrays, scalars, empty tensors and plain values."""
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
    """A value in a form that is equal only if every bit is."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bits(value).tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, value.tobytes()
    return type(value), value


SAVED = {
    1: {n: exact(leaf) for n, leaf in leaves(varied_state(1)).items()},
    2: {n: exact(leaf) for n, leaf in leaves(varied_state(2)).items()},
}


class Patient:
    """A repository of two versions, saved by two ranks on two nodes, that can be damaged and healed."""

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
        """Put ``damaged`` (None: nothing) in the place of an object, and see that nobody takes it for what it was."""
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
    """Whether the work succeeded; if not, its error must be raystow's and name the object."""
    try:
        work()
    except raystow.RaystowError as error:
        text = str(error)
    else:
        return True
    assert any(name in text for name in names), f"{text!r} does not name {names}"
    return False


@pytest.fixture(scope="module")
def patient() -> Iterator[Patient]:
    patient = Patient()
    patient.restore()
    patient.verify()
    for name in SAVED[2]:
        patient.read(name)
    yield patient
    patient.restore()
    patient.verify()


@pytest.fixture(scope="module")
def other() -> Patient:
    return Patient()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte(patient: Patient, kind: str, where: float, flip: int) -> None:
    change(patient, kind, where, flip)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_hundreds_of_changed_bytes(patient: Patient, kind: str, where: float, flip: int) -> None:
    change(patient, kind, where, flip)


def change(patient: Patient, kind: str, where: float, flip: int) -> None:
    """One byte, at a share of the object's length."""
    key = patient.key(kind)
    whole = patient.objects[key]
    at = int(where * len(whole))
    patient.examine(key, whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True))
def test_truncation(patient: Patient, kind: str, where: float) -> None:
    truncate(patient, kind, where)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True))
def test_hundreds_of_truncations(patient: Patient, kind: str, where: float) -> None:
    truncate(patient, kind, where)


def truncate(patient: Patient, kind: str, where: float) -> None:
    key = patient.key(kind)
    patient.examine(key, patient.objects[key][: int(where * len(patient.objects[key]))])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3, deadline=None)
@given(more=st.binary(min_size=1, max_size=200) | st.sampled_from([b"\n", b" ", b"\0", bytes(100_000)]))
def test_appended_bytes(patient: Patient, kind: str, more: bytes) -> None:
    key = patient.key(kind)
    patient.examine(key, patient.objects[key] + more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_object(patient: Patient, kind: str) -> None:
    patient.examine(patient.key(kind), None)


@pytest.mark.parametrize("kind", KINDS)
def test_another_object_in_its_place(patient: Patient, other: Patient, kind: str) -> None:
    """One of another kind, and that of another repository."""
    following = dict(zip(KINDS, [*KINDS][1:] + [*KINDS][:1], strict=True))
    replace(patient, kind, [patient.objects[patient.key(following[kind])], other.objects[other.key(kind)]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_other_object_in_its_place(patient: Patient, other: Patient, kind: str) -> None:
    replace(patient, kind, [*patient.objects.values(), *other.objects.values()])


def replace(patient: Patient, kind: str, by: list[bytes]) -> None:
    key = patient.key(kind)
    for data in by:
        if data != patient.objects[key]:
            # Of a marker and a root that name two repositories, no one can tell which is the right one.
            patient.examine(key, data, *((key, keys.ROOT) if kind == "marker" else (key,)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_swapped_with_its_neighbour(patient: Patient, kind: str) -> None:
    """The neighbour: an object of the same kind in the same repository, where there is one."""
    key, name = patient.key(kind), KINDS[kind].partition("-")[0]
    for neighbour, data in patient.objects.items():
        if neighbour != key and neighbour.rpartition("/")[2].startswith(name):
            patient.store.put(neighbour, [patient.objects[key]])
            try:
                patient.examine(key, data, key, neighbour)
            finally:
                patient.store.put(neighbour, [patient.objects[neighbour]])


@pytest.mark.parametrize("kind", ["marker", "root", "record"])
def test_every_byte_of_a_record_counts(patient: Patient, kind: str) -> None:
    from raystow.storage.format import records

    key = patient.key(kind)
    whole = patient.objects[key]
    records.load(whole, key)
    for at in range(len(whole)):
        for flip in (1, 0x20, 0x80):
            with pytest.raises(raystow.Damaged, match=key):
                records.load(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :], key)


def test_an_older_root_is_a_valid_root(patient: Patient) -> None:
    """Rolling the root back is outside the threat model (docs/spec/format-v1.md): the older version is read, bit for bit."""
    root = Root.load(patient.objects[keys.ROOT])
    older = Root(root.repository, root.epoch, root.owner, 2, "0" * 16, {}, root.versions[:1])
    patient.store.put(keys.ROOT, [older.dump()])
    try:
        patient.restore()
        patient.verify()
        assert [version.id for version in raystow.open(patient.uri).versions()] == [1]
    finally:
        patient.store.put(keys.ROOT, [patient.objects[keys.ROOT]])
