"""Lossy states are stored and restored."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compat import reader
from helpers.builders import flat
from helpers.local_cluster import LocalCluster

import raystow
from integration.cli_runner import run, run_json
from integration.ranks import every, start
from raystow.cli.output import size
from raystow.state.lossy import rounded_chunk
from raystow.state.lossy.rules import Blockwise, MantissaBits
from raystow.state.lossy.sqnr import Sqnr
from raystow.storage.errors import SaveFailed, StateError

N = 200_003


def mixed(n: int = N) -> dict[str, Any]:
    """Return weights, their master copy, moments like Adam's, and tensors that must never be rounded."""
    torch.manual_seed(0)
    master = {name: torch.randn(n) * 0.02 for name in "ab"}
    moments = {name: torch.randn(n) * 1e-4 for name in "ab"}
    return {
        "model": {"a": master["a"].bfloat16(), "b": master["b"].half(), "ids": torch.arange(n), "scale": torch.tensor(1.1)},
        "optim": {"master": master, "exp_avg": moments, "exp_avg_sq": {k: (m * m * 3).abs() for k, m in moments.items()}},
    }


def zeros(state: Any) -> Any:
    return {key: zeros(part) if isinstance(part, dict) else torch.zeros_like(part) for key, part in state.items()}


def test_a_profile_meets_its_bounds_and_keeps_weights_exact(tmp_path: Path) -> None:
    state = mixed()
    state["numpy"] = {"exp_avg": np.linspace(0.1, 1.0, 5000, dtype=np.float32)}
    with LocalCluster(str(tmp_path), codec="cpu", lossy="resume-bounded") as cluster:
        version = cluster.save(state, step=1)
    raystow.open(tmp_path).verify(version, deep=True)
    infos, found = version.tensors(), version.rounded()
    expected = flat({key: part for key, part in state.items() if key != "numpy"})
    floats = [name for name in expected if not name.endswith(("ids", "scale"))]
    assert sum(infos[name].stored for name in floats) <= 0.35 * sum(expected[name].nbytes for name in floats)
    assert {*found} == {name for name in floats if name.startswith("optim.")} | {"numpy.exp_avg"}
    for name, tensor in expected.items():
        got = version.read(name)
        if name.startswith("model."):
            assert torch.equal(got, tensor), name
            continue
        bits, error = (16 if "master" in name else 5), (got.double() - tensor.double()).abs()
        assert (error < 2.0**-bits * tensor.double().abs()).all()
        assert (found[name].rule, found[name].error) == (f"MantissaBits({bits})", error.max())
        noise = 10 * torch.log10(tensor.double().square().sum() / error.square().sum())
        assert found[name].sqnr == pytest.approx(noise.item())
    assert [name for name in floats if not infos[name].stored] == ["model.a", "model.b"]
    assert version.record.lossy["exp_avg"] == "MantissaBits(5)"
    array = state["numpy"]["exp_avg"]
    assert 0 < np.abs(version.read("numpy.exp_avg") / array - 1).max() < 2.0**-5


@pytest.mark.parametrize(
    "lossy",
    [
        "archive",
        {"exp_avg": Blockwise(8, 64), "exp_avg_sq": MantissaBits(3), "weights": MantissaBits(2)},
        {"exp_avg": Sqnr(36), "exp_avg_sq": Sqnr(24), "master": Sqnr(61)},
    ],
    ids=str,
)
def test_only_the_first_of_twenty_saves_loses_bits(tmp_path: Path, lossy: Any) -> None:
    state, first = mixed(30_001), dict[str, torch.Tensor]()
    with LocalCluster(str(tmp_path), codec="cpu", lossy=lossy) as cluster:
        for step in range(20):
            version = cluster.save(state, step=step)
            state = zeros(state)
            raystow.restore_latest(str(tmp_path), into=state)
            first = first or flat(state)
            assert all(torch.equal(tensor, first[name]) for name, tensor in flat(state).items())
            assert all(bool(one.noise) == (step == 0) for one in version.rounded().values())


def test_chosen_rules_are_reported_and_meet_the_bound(tmp_path: Path) -> None:
    """Two nodes save first; a new run restores and saves, without data of the first save in memory."""
    state = mixed()
    state["optim"]["exp_avg"]["b"][::500] *= 1000
    lossy = {"exp_avg": Sqnr(36), "exp_avg_sq": Sqnr(36), "master": Sqnr(61)}
    with LocalCluster(str(tmp_path), codec="cpu", nodes=2, lossy=lossy) as cluster:
        version = cluster.save_all([state, state], step=1)
    found, expected = version.rounded(), flat(state)
    for name, one in found.items():
        assert (one.sqnr or 0) >= (61 if "master" in name else 36), name
        assert (version.read(name) == 0).any() <= ("exp_avg." in name)
    assert {one.rule for name, one in found.items() if "exp_avg." not in name} == {"MantissaBits(9)", "MantissaBits(5)"}
    assert found["optim.exp_avg.a"].rule != found["optim.exp_avg.b"].rule
    assert torch.equal(version.read("model.a"), expected["model.a"])
    facts = run_json("show", tmp_path)
    assert facts["lossy"]["exp_avg"] == "Sqnr(36)"
    assert facts["rounded"]["optim.exp_avg.b"]["rule"] == found["optim.exp_avg.b"].rule
    restored = zeros(state)
    raystow.restore_latest(str(tmp_path), into=restored)
    with LocalCluster(str(tmp_path), codec="cpu", lossy=lossy) as cluster:
        again = cluster.save(restored, step=2)
    assert {one.rule.partition("(")[0] for one in again.rounded().values()} == {"Settled"}
    assert not again.tensors()["model.a"].stored
    assert all(torch.equal(again.read(name), version.read(name)) for name in found)


def test_weights_that_no_longer_follow_a_rule_are_stored(tmp_path: Path) -> None:
    """Eight bits are too few to derive a bfloat16, and a copy is derived only from a tensor that is rounded in the same way."""
    state = mixed()
    state["model"]["tied"] = state["optim"]["exp_avg"]["a"].clone()
    state["ema"] = {"exp_avg": state["optim"]["exp_avg"]["b"].clone()}
    with LocalCluster(str(tmp_path), codec="cpu", lossy={"master": MantissaBits(8), "exp_avg": MantissaBits(3)}) as cluster:
        version = cluster.save(state, step=1)
    infos = version.tensors()
    assert all(infos[name].stored for name in ("model.a", "model.b", "model.tied"))
    copies = ["ema.exp_avg", "optim.exp_avg.b"]
    assert sorted(bool(infos[name].stored) for name in copies) == [False, True]
    assert {*copies} <= {*version.rounded()}
    for name in ("a", "b", "tied"):
        assert torch.equal(version.read(f"model.{name}"), state["model"][name])
    raystow.open(tmp_path).verify(version, deep=True)


def test_statistics_of_all_ranks_cover_whole_tensors(tmp_path: Path) -> None:
    state = mixed()
    with LocalCluster(str(tmp_path), codec="cpu", nodes=2, lossy="resume-bounded") as cluster:
        version = cluster.save_all([state, state], step=1)
    master = state["optim"]["master"]["a"].double()
    assert version.rounded()["optim.master.a"].signal == pytest.approx(master.square().sum().item())
    assert len({info.node for info in version.record.fragments}) == 2


@pytest.mark.usefixtures("cluster")
def test_the_checkpointer_of_each_rank_rounds_its_part(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, compression=raystow.Compression(lossy="resume-bounded"))
    every(ranks, "set", mixed)
    every(ranks, "save", 1)
    version = every(ranks, "result")[0]
    assert version.record.lossy["master"] == "MantissaBits(16)"
    assert {one.rule for one in version.rounded().values()} == {"MantissaBits(16)", "MantissaBits(5)"}
    every(ranks, "restore")
    every(ranks, "save", 2)
    again = every(ranks, "result")[0]
    assert {*again.rounded()} == {*version.rounded()}
    assert not any(one.noise for one in again.rounded().values()), "the restored state is rounded already"


def test_an_error_beyond_its_bound_fails_and_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_round(rule: MantissaBits, values: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        made, bound = original(rule, values, first)
        return made + values.abs().max() * (torch.arange(values.numel()) == 77).view_as(values), bound

    original = MantissaBits.round
    monkeypatch.setattr(MantissaBits, "round", wrong_round)
    with LocalCluster(str(tmp_path), codec="cpu", lossy={"master": MantissaBits(16)}) as cluster:
        with pytest.raises(SaveFailed, match=r"optim\.master\.a: MantissaBits\(16\) has changed \d numbers"):
            cluster.save(mixed(), step=1)
        assert not cluster.repository.versions()


def test_invalid_rules_raise_at_once_or_at_the_first_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rule that matches no tensor is only detected at a save."""
    for wrong in ("tiny", {"exp_avg": 4}, {"exp_avg_sq": Blockwise(8)}, {1: MantissaBits(3)}):
        with pytest.raises(StateError):
            LocalCluster(str(tmp_path), lossy=wrong)
    rules = {"exp_average": MantissaBits(3), "master": MantissaBits(16)}
    with caplog.at_level(logging.WARNING), LocalCluster(str(tmp_path), codec="cpu", lossy=rules) as cluster:
        cluster.save(mixed(), step=1)
    messages = [record.getMessage() for record in caplog.records if record.name.endswith("state.shard_rules")]
    assert [text.rpartition(" ")[2] for text in messages] == ["exp_average"]


def test_commands_report_rounding_and_other_readers_read_it(tmp_path: Path) -> None:
    state = mixed()
    with LocalCluster(str(tmp_path), codec="cpu", lossy="resume-bounded") as cluster:
        version = cluster.save(state, step=1)
    facts = run_json("show", tmp_path)
    assert facts["lossy"]["master"] == "MantissaBits(16)"
    shown, found = facts["rounded"]["optim.exp_avg.a"], version.rounded()["optim.exp_avg.a"]
    assert (shown["max_error"], shown["sqnr"], shown["spared"]) == (found.error, found.sqnr, found.spared)
    assert shown["stored"] < shown["raw"] - shown["spared"] < shown["raw"]
    printed = run("show", tmp_path).stdout
    assert "lossy    MantissaBits(16): weights, master" in printed
    assert f"about {size(sum(one.spared for one in version.rounded().values()))} compared to lossless" in printed
    assert max(map(len, printed.replace(str(tmp_path), "/r").splitlines())) <= 80
    prices = ("--gpus", 8, "--gpu-price", 4, "--store-price", 0.02, "--every", "1h", "--write-rate", "5GB")
    assert any("due to rounding" in text for text in run_json("cost", tmp_path, *prices)["assumptions"])
    assert all(np.array_equal(array, version.read(name).view(torch.uint8).numpy().view(array.dtype).reshape(array.shape))
               for name, array in reader.read(tmp_path).items() if name != "model.scale")  # fmt: skip


def test_rounding_in_place_equals_the_rounding_of_a_save() -> None:
    for tensor in (torch.randn(30, 40), torch.randn(40, 30).t(), torch.tensor([1.23456])):
        rows = tensor.clone(memory_format=torch.contiguous_format).reshape(-1, tensor.shape[-1])
        bits, _ = rounded_chunk.rounded(MantissaBits(6), rows.view(torch.int32), "float32")
        rounded_chunk.round_in_place(MantissaBits(6), tensor)
        assert torch.equal(tensor, bits.view(torch.float32).view(tensor.shape))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
@pytest.mark.parametrize("selector", [MantissaBits(6), Blockwise(), Sqnr(40)], ids=str)
def test_the_empty_part_of_a_rank_is_rounded(selector: MantissaBits | Blockwise | Sqnr, shape: tuple[int, ...]) -> None:
    """A sensitivity analysis would otherwise fail on this rank alone, and the other ranks would wait for it."""
    rounded_chunk.round_in_place(selector, torch.empty(shape))
