"""Weights that are their rounded master copy are stored and restored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compat import reader
from helpers.builders import flat
from helpers.local_cluster import LocalCluster
from helpers.state_equality import same
from safetensors.torch import load_file

import raystow
from integration.cli_runner import run_json
from integration.ranks import every, start

N = 3_000_001


def mixed(seed: int, stray: int | None = None) -> dict[str, Any]:
    """Return weights of two dtypes, their master copies and moments; element ``stray`` of one weight differs in one bit."""
    generator = torch.Generator().manual_seed(seed)
    master = {name: torch.randn(N, generator=generator) for name in "ab"}
    weights = {"a": master["a"].bfloat16(), "b": master["b"].half()}
    if stray is not None:
        weights["a"].view(torch.int16)[stray] ^= 1
    moments = {name: torch.rand(N, generator=generator) for name in "ab"}
    return {"model": {**weights, "tied": weights["a"]}, "optim": {"master": master, "exp_avg": moments}}


def zeros(state: Any) -> Any:
    return {name: zeros(part) if isinstance(part, dict) else torch.zeros_like(part) for name, part in state.items()}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("world", [1, 3])
def test_derived_weights_take_no_bytes_and_are_restored(tmp_path: Path, world: int) -> None:
    """Of several ranks, only the tied weights take none: all ranks hold all tensors."""
    ranks = start(str(tmp_path), world)
    every(ranks, "set", mixed, 1)
    every(ranks, "save", 1)
    (version,) = {one.id: one for one in every(ranks, "result")}.values()
    raystow.open(tmp_path).verify(version, deep=True)
    infos = version.tensors()
    derived = ["model.a", "model.b", "model.tied"] if world == 1 else ["model.tied"]
    assert [name for name, info in infos.items() if not info.stored] == derived
    assert infos["optim.master.a"].stored < 4 * N
    if world == 1:
        assert infos["optim.master.a"].group == "weights", "weights are read from their master copy only"
    assert version.raw == sum(tensor.nbytes for tensor in flat(mixed(1)).values())
    assert version.bytes == sum(info.stored for info in infos.values())
    assert same({"model": {name: version.read(f"model.{name}") for name in mixed(1)["model"]}}, {"model": mixed(1)["model"]})
    assert torch.equal(version.read("model.b", slice(70_000, 2_500_003)), mixed(1)["model"]["b"][70_000:2_500_003])
    every(ranks, "set", mixed, 2)
    every(ranks, "restore")
    for rank in ranks:
        assert same(every([rank], "do", _state)[0], mixed(1))
    into = {"model": zeros(mixed(1)["model"])}
    raystow.restore_latest(str(tmp_path), into=into, strict=False)
    assert same(into, {"model": mixed(1)["model"]})


def _state(rank: Any) -> Any:
    return rank.state


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_weights_with_stray_elements_are_saved_exactly(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 1, compression=raystow.Compression(codec="cpu"))  # whatever else runs here
    strays = (None, N // 2, N // 2, N // 2, None)  # the fourth save checks again whether weights can be derived, for the fifth
    for step, stray in enumerate(strays, 1):
        every(ranks, "set", mixed, step, stray)
        every(ranks, "save", step)
        every(ranks, "result")
    check_strays(tmp_path, strays)


def test_a_chunk_that_cannot_be_derived_is_stored(tmp_path: Path) -> None:
    strays = (None, N // 2)
    with LocalCluster(str(tmp_path), codec="cpu") as cluster:
        for step, stray in enumerate(strays, 1):
            cluster.save(mixed(step, stray), step=step)
    check_strays(tmp_path, strays)


def check_strays(folder: Path, strays: Sequence[int | None]) -> None:
    """Assert that only the chunk with a stray element has stored bytes, and that every version has its saved values."""
    repository = raystow.open(folder)
    for version, stray in zip(repository.versions(), strays, strict=True):
        stored = version.tensors()["model.a"].stored
        assert 0 < stored <= 4 << 20 if stray is not None else stored == 0
        assert same({name: version.read(name) for name in flat(mixed(1))}, flat(mixed(version.step, stray)))
        repository.verify(version, deep=True)


def test_restored_files_contain_the_tensors_of_their_group(tmp_path: Path) -> None:
    """The master copy is stored in the packs of the weights."""
    with LocalCluster(str(tmp_path / "run"), codec="cpu") as cluster:
        cluster.save(mixed(1), step=1)
    run_json("restore", tmp_path / "run", "--output", tmp_path / "files")
    files = {path.stem: load_file(path) for path in (tmp_path / "files").glob("*.safetensors")}
    assert {name: set(tensors) for name, tensors in files.items()} == {
        "weights": {"model.a", "model.b", "model.tied"},
        "optimizer": {"optim.master.a", "optim.master.b", "optim.exp_avg.a", "optim.exp_avg.b"},
    }
    assert same(files["weights"] | files["optimizer"], flat(mixed(1)))


def test_the_specification_reader_reads_derived_weights(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path), codec="cpu") as cluster:
        cluster.save(mixed(1), step=1)
    found = reader.read(tmp_path)
    for name, tensor in flat(mixed(1)).items():
        assert found[name].tobytes() == tensor.view(torch.uint8).numpy().tobytes(), name
