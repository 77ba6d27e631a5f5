"""Fragments of flattened tensors are stored in the shape of the tensors, and restored into other fragments or whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster

from raystow.orchestrator.save.flat_fragment import FlatFragment
from raystow.storage.errors import SaveFailed

SHAPES = {"cube": (5, 4, 3), "matrix": (7, 3), "row": (50,), "one": (1,), "scalar": (), "long": (300, 90)}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def fragments(tensors: dict[str, torch.Tensor], cuts: Sequence[float]) -> list[dict[str, Any]]:
    """Return the fragments of each rank for flattened tensors that are cut at these fractions of their lengths."""
    ranks = []
    for low, high in itertools.pairwise((0, *cuts, 1)):
        rank = dict[str, Any]()
        for name, tensor in tensors.items():
            start, stop = (round(at * tensor.numel()) for at in (low, high))
            rank[name] = FlatFragment(tensor.flatten()[start:stop], tuple(tensor.shape), start)
        ranks.append(rank)
    return ranks


def test_fragments_restore_whole_tensors_and_other_fragments() -> None:
    tensors = whole()
    with LocalCluster("memory://fragments", nodes=2) as cluster:
        first = cluster.save_all(fragments(tensors, (0.3, 0.45)), step=1)
        for tensor in tensors.values():
            tensor.mul_(2)
        version = cluster.save_all(fragments(tensors, (0.3, 0.45)), step=2)
    assert version.tensors().keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(version.read(name), tensor)
        assert torch.equal(first.read(name) * 2, tensor)
    for part in fragments(tensors, (0.1, 0.5, 0.51)):
        into = {name: FlatFragment(torch.zeros_like(f.elements), f.shape, f.start) for name, f in part.items()}
        version.restore(into)
        assert all(torch.equal(into[name].elements, part[name].elements) for name in tensors)


def test_fragments_with_a_gap_make_no_version() -> None:
    ranks = fragments(whole(), (0.5,))
    ranks[1]["long"] = FlatFragment(ranks[1]["long"].elements[1:], SHAPES["long"], ranks[1]["long"].start + 1)
    with LocalCluster("memory://gap") as cluster, pytest.raises(SaveFailed, match="do not add up to whole tensors"):
        cluster.save_all(ranks, step=1)
