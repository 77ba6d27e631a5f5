"""Versions saved by two ranks, thinned by ``raystow prune``, and read by all commands that read versions."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compat import reader  # uses no raystow code
from helpers.builders import orphans
from helpers.local_cluster import LocalCluster
from helpers.state_equality import same

import raystow
from integration.cli_runner import ran, run_json
from raystow.storage.errors import StateError
from raystow.storage.format import keys
from raystow.storage.repository import Repository, open_repository
from raystow.storage.retention.policy import Policy
from raystow.storage.stores import open_store

STEPS = (1, 2, 3, 4)


def mixed_precision_state(step: int) -> dict[str, Any]:
    """Return a mixed-precision state: weights that are the rounded master copy, tied weights, moments, a NaN and plain values."""
    torch.manual_seed(step)
    master = {f"layer{i}": torch.randn(300, 200) for i in range(3)}
    weights = {name: words.bfloat16() for name, words in master.items()}
    return {
        "model": {**weights, "head": weights["layer0"].clone(), "norm": torch.tensor([float("nan"), -0.0, 1.0])},
        "optimizer": {"master": master, "exp_avg": {name: torch.randn(300, 200) for name in master}, "lr": 0.1 / step},
        "step": step,
    }


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinning") / "run"
    with LocalCluster(str(folder), nodes=2) as local:
        for step in STEPS:
            local.save_all([mixed_precision_state(step), mixed_precision_state(step)], step=step, metrics={"loss": 1.0 / step})
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def blank(step: int = 9) -> dict[str, Any]:
    return {"model": mixed_precision_state(step)["model"], "step": 0}


def check_thin(repository: Repository, id: int) -> None:
    version = repository.version(id)
    into = blank()
    raystow.restore(version, into)
    assert same(into, {"model": mixed_precision_state(id)["model"], "step": id})
    repository.verify(version)
    assert not version.resumable


def test_prune_thins_versions_that_all_commands_can_read(folder: Path) -> None:
    repository = open_repository(str(folder))
    before = {version.id: version.bytes for version in repository.versions()}
    dry = run_json("prune", folder, "--resumable", 2, "--dry-run")
    assert [row["thin"] for row in dry["versions"]] == [True, True, False, False]
    assert dry["thinned"] == []
    assert dry["versions"][0]["rules"] == ["no rule drops it", "older than the last 2 resumable"]
    estimate = dry["versions"][0]["stored_thin"]
    done = run_json("prune", folder, "--resumable", 2)
    assert (done["thinned"], done["dropped"]) == ([1, 2], [])
    for id in (1, 2):
        check_thin(repository, id)
    assert repository.version(1).bytes <= estimate < before[1] / 2.5
    ran("gc", folder, "--grace", "0s", "--yes")
    assert orphans(repository) == []
    for id in (1, 2):
        check_thin(repository, id)
    for version in repository.versions()[2:]:
        into = mixed_precision_state(9)
        raystow.restore(version, into)
        assert same(into, mixed_precision_state(version.step))
    assert [row["groups"] for row in run_json("ls", folder)["versions"]] == [["weights"], ["weights"], None, None]
    assert "weights only" in ran("ls", folder).stdout
    shown = run_json("show", folder, 1)
    assert shown["thinned"]["groups"] == ["weights"]
    assert shown["world_size"] == 2
    assert "weights only" in ran("show", folder, 1).stdout
    assert run_json("show", folder, 3)["thinned"] is None
    again = run_json("prune", folder, "--resumable", 2)
    assert (again["thinned"], [row["thin"] for row in again["versions"]]) == ([], [False] * 4)
    ran("verify", folder, "--all", "--deep")
    ran("diff", folder, 1, 3)
    ran("plan", folder, 1)
    ran("restore", folder, 1, "--output", folder.parent / "files")
    assert [path.name for path in sorted((folder.parent / "files").iterdir())] == ["values.json", "weights.safetensors"]
    ran("report", folder, "--output", folder.parent / "report.html")
    found = reader.read(folder, 1)
    assert {name.partition(".")[0] for name in found} == {"model"}
    assert np.array_equal(found["model.layer1"], mixed_precision_state(1)["model"]["layer1"].view(torch.uint16).numpy())


def test_prune_rounds_the_thinned_weights(folder: Path) -> None:
    repository = open_repository(str(folder))
    exact = repository.version(1).read("model.layer1")
    text = " ".join(ran("prune", folder, "--resumable", 1, "--delta", 6, "--mantissa-bits", 4, "--dry-run").stdout.split())
    assert "older than the last 1 resumable, as a delta to version 1, 4 bits of mantissa: about" in text
    done = run_json("prune", folder, "--resumable", 1, "--delta", 6, "--mantissa-bits", 4)
    assert done["thinned"] == [1, 2, 3]
    for id in (1, 2, 3):
        into, version = blank(), repository.version(id)
        raystow.restore(version, into)
        for name, expected in mixed_precision_state(id)["model"].items():
            found = into["model"][name]
            assert same(found, expected) if expected.dim() == 1 else 0 < ((found - expected) / expected).abs().max() <= 2**-5
        repository.verify(version)
    ran("gc", folder, "--grace", "0s", "--yes")
    shown = run_json("show", folder, 1)["rounded"]
    assert {name: one["rule"] for name, one in shown.items()} == dict.fromkeys(
        ["model.head", "model.layer0", "model.layer1", "model.layer2"], "NearestBits(4)"
    )
    text = ran("show", folder, 1).stdout
    assert "weights only, with 4 bits of mantissa" in text
    assert "NearestBits(4)" in text
    assert "compared to lossless" in text
    found = np.frombuffer(reader.read(folder, 1)["model.layer1"].astype("<u4") << 16, np.float32)
    assert abs(found.reshape(exact.shape) / exact.float().numpy() - 1).max() <= 2**-5
    ran("verify", folder, "--all", "--deep")
    assert run_json("prune", folder, "--resumable", 1, "--mantissa-bits", 2)["thinned"] == []


def test_prune_text_reports_dropped_and_thinned_versions(folder: Path) -> None:
    text = " ".join(ran("prune", folder, "--keep-last", 3, "--resumable", 1, "--dry-run").stdout.split())
    assert "drop no rule keeps it" in text
    assert "thin last 3; older than the last 1 resumable: about" in text
    assert "keep 3 versions" in text
    assert "thin 2 of these, by about" in text
    assert "nothing was dropped or thinned" in text
    text = " ".join(ran("prune", folder, "--keep-last", 3, "--resumable", 1, "--yes").stdout.split())
    assert "dropped 1 version and thinned 2 versions, " in text
    assert [version.resumable for version in open_repository(str(folder)).versions()] == [False, False, True]


def test_a_damaged_version_is_reported_and_others_are_thinned(folder: Path) -> None:
    repository = open_repository(str(folder))
    first = repository.version(1)
    (pack, *_) = [p for p in first.packs if p.group == "weights"]
    key = keys.pack(1, first.attempt, *pack.place)
    repository.store.put(key, [bytes(pack.size)])
    fields = run_json("prune", folder, "--resumable", 1, code=3)
    assert fields["thinned"] == [2, 3]
    assert key in fields["error"]["subject"]
    assert repository.version(1) == first
    assert "error: " in ran("prune", folder, "--resumable", 1, "--yes", code=3).stderr


def test_restoring_a_thinned_version_fully_reports_the_thinning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    repository = open_repository(str(folder))
    plan = repository.plan_retention(Policy(keep_last=3, resumable=1))
    assert [line.split(": ")[1] for line in plan.explain()] == ["dropped", "thinned", "thinned", "kept"]
    assert [entry.id for entry in plan.execute()] == [1]
    into = mixed_precision_state(9)
    with pytest.raises(StateError, match=r"optimizer\.exp_avg.*was thinned at 20.* UTC and holds its weights only") as caught:
        raystow.restore(repository.version(2), into)
    assert "newer version" in caught.value.remedy
    assert same(into, mixed_precision_state(9)), "nothing was touched"
    with caplog.at_level(logging.WARNING):
        raystow.restore(repository.version(2), into, strict=False)
    assert "was thinned" in caplog.text
    assert same(into, {**mixed_precision_state(9), "model": mixed_precision_state(2)["model"], "step": 2})
    whole = mixed_precision_state(9)
    version = raystow.restore_latest(str(folder), whole)
    assert version is not None
    assert same(whole, mixed_precision_state(4))


def test_a_policy_that_thins_is_refused_by_a_run() -> None:
    with pytest.raises(StateError, match="drops versions but does not thin them") as caught:
        raystow.Checkpointer("/nowhere", retention=Policy(keep_last=9, resumable=2, delta=5, mantissa_bits=4))
    assert "raystow prune /nowhere --resumable 2 --delta 5 --mantissa-bits 4 --yes" in caught.value.remedy


@pytest.mark.s3
def test_thinned_versions_on_s3_are_readable(template: Path, s3_uri: str) -> None:
    local = open_repository(str(template)).store
    store = open_store(s3_uri)
    for info in local.list(""):
        data = local.get(info.key, max_bytes=1 << 30)
        if info.key in (keys.MARKER, keys.ROOT):
            store.put_if(info.key, data, None)
        else:
            store.put(info.key, [data])
    repository = open_repository(s3_uri)
    repository.plan_retention(Policy(resumable=3)).execute()
    check_thin(repository, 1)
    repository.plan_collection(grace=0.0).execute()
    check_thin(repository, 1)
    assert orphans(repository) == []
