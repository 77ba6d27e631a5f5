"""A restore refuses targets that share memory, naming both, unless they get the same elements. Nothing is changed then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.colliding_tensors import colliding_tensors
from helpers.local_cluster import LocalCluster

import raystow
from raystow.orchestrator.restore.targets import RestoreTarget, distinct
from raystow.storage.versions.version import Version

SHAPE = 400, 3000
_NAMES = itertools.count()


def save(state: dict[str, Any]) -> Version:
    with LocalCluster(f"memory://shared-targets-{next(_NAMES)}") as cluster:
        return cluster.save(state, step=1)


@pytest.fixture(scope="module")
def version() -> Version:
    """Return a version of two tensors that differ."""
    return save({"emb": torch.randn(SHAPE), "head": torch.randn(SHAPE)})


def same() -> dict[str, Any]:
    weight = torch.full(SHAPE, 9.0)
    return {"emb": weight, "head": weight}


def alias_of_numpy() -> dict[str, Any]:
    weight = np.full(SHAPE, 9, np.float32)
    return {"emb": torch.from_numpy(weight), "head": weight}


def parts_of_a_buffer() -> dict[str, Any]:
    buffer = torch.full((700, 3000), 9.0)
    return {"emb": buffer[:400], "head": buffer[300:]}


def across_dtypes() -> dict[str, Any]:
    buffer = torch.full((400, 3001), 9.0).view(torch.int32)
    return {"emb": buffer[:, :3000].view(torch.float32), "head": buffer[:, 1:].view(torch.float32)}


def turned() -> dict[str, Any]:
    square = torch.full((3000, 3000), 9.0)
    return {"emb": square[:400], "head": square.T[:400]}


def backwards() -> dict[str, Any]:
    weight = np.full(SHAPE, 9, np.float32)
    return {"emb": weight, "head": weight[::-1]}


SHARED = [same, alias_of_numpy, parts_of_a_buffer, across_dtypes, turned, backwards]


@pytest.mark.parametrize("make", SHARED)
def test_targets_that_share_memory_are_refused_by_name(version: Version, make: Callable[[], dict[str, Any]]) -> None:
    into = make()
    with pytest.raises(raystow.StateError, match=r'into\["(emb|head)"\]: .* memory .*into\["(emb|head)"\].*clone\(\)') as error:
        raystow.restore(version, into)
    assert all(f'into["{name}"]' in str(error.value) for name in into)
    assert all((np.asarray(target) == 9).all() for target in into.values())


def test_the_latest_version_is_not_replaced_by_an_older_one(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(f"memory://shared-targets-{next(_NAMES)}") as cluster:
        for step in range(3):
            cluster.save({"emb": torch.randn(SHAPE), "head": torch.randn(SHAPE)}, step=step)
    with pytest.raises(raystow.StateError, match="is the memory of"):
        raystow.restore_latest(cluster.uri, into=same())
    assert "DAMAGED" not in caplog.text


@pytest.mark.parametrize("make", [torch.randn, lambda shape: torch.randn(shape).numpy()], ids=["torch", "numpy"])
def test_tied_targets_with_equal_elements_are_filled(make: Callable[..., Any]) -> None:
    weight = make(SHAPE)
    version = save({"emb": weight, "other": make(7), "deep": [{"head": weight}]})
    target, read = make(SHAPE), list[int]()
    raystow.restore(version, {"emb": target, "other": make(7), "deep": [{"head": target}]}, progress=read.append)
    assert np.array_equal(np.asarray(target), np.asarray(weight))
    assert sum(read) == 4 * (400 * 3000 + 7)  # once
    bf16 = torch.zeros(SHAPE, dtype=torch.bfloat16)
    raystow.restore(version, {"emb": bf16, "deep": [{"head": bf16}]}, strict=False, cast=True)
    assert torch.equal(bf16, torch.as_tensor(weight).bfloat16())


def test_tied_targets_with_colliding_digests_are_refused() -> None:
    one, other = map(torch.from_numpy, colliding_tensors())
    version, target = save({"a": one, "b": other, "c": one}), torch.zeros_like(one)
    with pytest.raises(raystow.StateError, match="the version holds different elements for them"):
        raystow.restore(version, {"a": target, "b": target}, strict=False)
    assert not target.any()
    raystow.restore(version, {"a": target, "c": target}, strict=False)
    assert torch.equal(target, one)


def test_tied_targets_are_filled_however_they_are_stored() -> None:
    first, second = (torch.randn(SHAPE) for _ in range(2))
    last = first + 1e-4
    with LocalCluster(f"memory://shared-targets-{next(_NAMES)}", delta=9) as cluster:
        cluster.save({"a": first, "b": second}, step=1)
        version = cluster.save({"a": last, "b": last}, step=2)
        bases = [version.chunks[name][0].coding.base for name in "ab"]
        assert bases == [1, 1], "both are deltas, to different elements"
        target = torch.zeros(SHAPE)
        raystow.restore(cluster.uri, {"a": target, "b": target}, 2)
    assert torch.equal(target, last)


def test_equal_bits_of_other_values_are_not_tied() -> None:
    version = save({"a": torch.ones(50, dtype=torch.complex64) * 1j, "b": torch.ones(50, dtype=torch.complex64) * 1j})
    target = torch.zeros(50, dtype=torch.complex64)
    with pytest.raises(raystow.StateError, match="shares memory with"):
        raystow.restore(version, {"a": target, "b": target.conj()})
    words = torch.zeros(50, 2)
    pairs = {"a": words, "b": words.view(torch.int32)}
    with pytest.raises(raystow.StateError, match="shares memory with"):
        raystow.restore(save({"a": torch.ones(50, 2), "b": torch.ones(50, 2)}), pairs, cast=True)
    assert not target.any()
    assert not words.any()


def columns() -> dict[str, Any]:
    weight = torch.zeros(400, 6000)
    return {"emb": weight[:, ::2], "head": weight[:, 1::2]}


def halves() -> dict[str, Any]:
    weight = np.zeros((400, 6000), np.float32)
    return {"emb": torch.from_numpy(weight)[:, :3000], "head": weight[:, 3000:]}


def rows_backwards() -> dict[str, Any]:
    weight = np.zeros((800, 3000), np.float32)
    return {"emb": weight[::-2], "head": weight[::2]}


@pytest.mark.parametrize("make", [columns, halves, rows_backwards])
def test_views_of_one_buffer_without_a_common_element_are_filled(version: Version, make: Callable[[], dict[str, Any]]) -> None:
    into = make()
    raystow.restore(version, into)
    for name, target in into.items():
        assert np.array_equal(np.asarray(target), np.asarray(version.read(name)))


def test_targets_that_are_not_filled_may_share_memory(version: Version) -> None:
    weight = torch.zeros(SHAPE)
    raystow.restore(version, {"emb": weight, "unsaved": weight[3:], "head": torch.zeros(SHAPE)}, strict=False)
    assert torch.equal(weight, version.read("emb"))


def test_numbers_and_tensors_of_one_memory_are_refused() -> None:
    version = save({"a": 1, "b": 2, "c": 2})
    step, buffer = torch.zeros(()), torch.zeros(2)
    with pytest.raises(raystow.StateError, match=r'into\["b"\]: is the memory of into\["a"\]'):
        raystow.restore(version, {"a": step, "b": step, "c": 0})
    assert step == 0
    raystow.restore(version, {"a": buffer[0], "b": buffer[1], "c": buffer[1]})
    assert buffer.tolist() == [1, 2]


def test_sharing_is_found_exactly() -> None:
    """Compared with the sets of addresses, over views of a small buffer."""
    buffer, random = np.zeros(240, np.int16), np.random.default_rng(0)
    views = [
        np.lib.stride_tricks.as_strided(buffer[random.integers(100) :], shape, (2 * a, 2 * b))
        for shape in [(3, 4), (5, 2), (2, 1), (4, 4)]
        for a, b in [(4, 1), (8, 2), (1, 8), (20, 3), (9, 2)]
    ]
    views = [view for view in views if len(set(addresses(view))) == view.size]
    outcomes = set()
    for pair in itertools.combinations(views, 2):
        shared = not set(addresses(pair[0])).isdisjoint(addresses(pair[1]))
        outcomes.add(shared)
        targets = [RestoreTarget(f"{i}", torch.from_numpy(view) if i else view, lambda i=i: i) for i, view in enumerate(pair)]
        if shared:
            with pytest.raises(raystow.StateError, match="memory"):
                distinct(targets)
        else:
            assert distinct(targets) == targets
    assert outcomes == {False, True}


def addresses(view: np.ndarray) -> list[int]:
    start = view.__array_interface__["data"][0]
    return [start + sum(i * s for i, s in zip(at, view.strides, strict=True)) for at in np.ndindex(view.shape)]


def test_very_many_targets_are_compared_by_their_addresses() -> None:
    """With a comparison of all pairs, this would take minutes."""
    buffer = torch.zeros(30_000)
    targets = [RestoreTarget(str(i), part, lambda: None) for i, part in enumerate(buffer.split(1))]
    assert len(distinct(targets)) == 30_000
    with pytest.raises(raystow.StateError, match="more: shares memory with 29997"):
        distinct([*targets, RestoreTarget("more", buffer[29_997:29_999], lambda: None)])
