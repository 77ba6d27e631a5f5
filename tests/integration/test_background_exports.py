"""``Checkpointer(export=...)``: the coordinator exports versions while a training runs."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.polling import wait_until
from safetensors.torch import load
from transformers import AutoModelForCausalLM, AutoTokenizer

import raystow
from integration.cli_runner import ran, run_json
from integration.language_models import config_folder, gpt2, same
from integration.ranks import Rank, every, start
from raystow.orchestrator.coordinator.ray_client import coordinator_actor
from raystow.storage.stores import open_store

pytestmark = pytest.mark.usefixtures("cluster")


def _state(scale: float) -> dict[str, Any]:
    weights = {name: scale * value for name, value in gpt2().state_dict().items()}
    return {"model": weights, "optim": {"exp_avg": torch.zeros(3)}}


def _train(rank: Rank, losses: list[float]) -> None:
    """Save a version for each loss."""
    for loss in losses:
        rank.checkpointer.save(_state(loss), step=int(loss), metrics={"loss": loss}).result(60)


def _exports(uri: Path) -> dict[str, int]:
    return raystow.open(uri).root().exports


@pytest.mark.long
def test_every_second_version_is_exported(tmp_path: Path) -> None:
    uri, out = tmp_path / "run", tmp_path / "served"
    config = config_folder(gpt2(), tmp_path / "config")
    ranks = start(str(uri), 1, export=raystow.Export(str(out), 2, tokenizer=str(config)))
    every(ranks, "do", _train, [3.0, 2.0])
    place = f"{out}/version-00000002"
    wait_until(lambda: _exports(uri) == {place: 2}, "an export")
    model = gpt2()
    model.load_state_dict(_state(2.0)["model"])
    assert same(AutoModelForCausalLM.from_pretrained(place), model)
    assert AutoTokenizer.from_pretrained(place)("tiny model")["input_ids"] == [1, 2]
    assert f"exported to {place}" in ran("ls", uri, columns=400).output
    assert run_json("ls", uri)["exports"] == {place: 2}
    assert f"exported {place}" in ran("show", uri, 2, columns=400).output


def test_the_best_version_is_exported(tmp_path: Path) -> None:
    uri, out = tmp_path / "run", tmp_path / "served"
    policy = raystow.Policy(keep_last=5, keep_best=("loss", "min", 1))
    ranks = start(str(uri), 1, retention=policy, export=raystow.Export(str(out), "best"))
    for losses, newest in (([2.0], 1), ([3.0], 1), ([1.0], 3)):
        every(ranks, "do", _train, losses)
        wait_until(lambda newest=newest: max(_exports(uri).values(), default=0) == newest, f"the export of version {newest}")
    assert [*_exports(uri).values()] == [1, 3]


def test_a_pinned_version_is_exported(tmp_path: Path) -> None:
    uri, out = tmp_path / "run", tmp_path / "served"
    ranks = start(str(uri), 1, export=raystow.Export(str(out), "pin:serve"))
    every(ranks, "do", _train, [3.0, 2.0])
    repository = raystow.open(uri)
    repository.pin(repository.version(1), "serve")
    every(ranks, "do", _train, [1.0])
    wait_until(lambda: [*_exports(uri).values()] == [1], "an export")


def test_a_failed_export_affects_no_save(tmp_path: Path) -> None:
    uri, out = tmp_path / "run", tmp_path / "served"
    (out / "version-00000001").mkdir(parents=True)
    (out / "version-00000001" / "config.json").write_text("of another model")
    ranks = start(str(uri), 1, export=raystow.Export(str(out)))
    every(ranks, "do", _train, [3.0])
    failed = f"{out}/version-00000001"
    wait_until(lambda: [*raystow.open(uri).root().failed_exports] == [failed], "the failure of an export")
    assert f"the export to {failed} failed" in ran("ls", uri, columns=400).output
    assert [*run_json("ls", uri)["failed_exports"]] == [failed]
    every(ranks, "set", _state, 2.0)
    every(ranks, "save", 2)
    (warnings,) = every(ranks, "do", lambda rank: (rank.pending[0].result(60), rank.pending[0].warnings)[1])
    assert f"an export to {failed} failed, and is tried again" in " ".join(warnings)
    wait_until(lambda: [*_exports(uri).values()] == [2], "an export")
    assert raystow.open(uri).root().failed_exports == {}
    assert [version.step for version in raystow.open(uri).versions()] == [3, 2]
    assert [path.name for path in (out / "version-00000001").iterdir()] == ["config.json"]


@pytest.mark.long
@pytest.mark.s3
def test_a_job_on_s3_exports_to_its_store(s3_uri: str, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    rank = ray.remote(Rank).options(num_cpus=0, resources={"node_a": 1}, runtime_env={"env_vars": variables}).remote()
    place = f"{s3_uri}-served/version-00000001"
    ray.get(rank.begin.remote(s3_uri, 0, 1, {"export": raystow.Export(f"{s3_uri}-served")}), timeout=120)
    ray.get(rank.do.remote(_train, [3.0]), timeout=120)
    wait_until(lambda: raystow.open(s3_uri).root().exports == {place: 1}, "an export")
    store = open_store(place)
    weights = load(store.get("model.safetensors", max_bytes=1 << 30))
    assert torch.equal(weights["transformer.wte.weight"], 3.0 * gpt2().state_dict()["transformer.wte.weight"])
    assert {one.key for one in store.list("")} == {"model.safetensors"}
    ray.get(rank.leave.remote(), timeout=60)
    ray.kill(rank)


def _die_at_the_next_export(uri: Path) -> None:
    """Let the coordinator be killed when it has written the tensors of an export. Ray starts it again."""

    def arm(coordinator: object) -> None:
        def die(write: object, parts: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        importlib.import_module("raystow.orchestrator.export.version_files").write_index = die  # type: ignore[attr-defined]

    ray.get(coordinator_actor(uri.as_uri()).__ray_call__.remote(arm), timeout=60)


def _killed_export(uri: Path, out: Path, world_size: int = 1) -> list[Any]:
    """Return ranks whose first version was being exported when the coordinator was killed."""
    ranks = start(str(uri), world_size, export=raystow.Export(str(out), max_shard_size=20_000))
    _die_at_the_next_export(uri)
    every(ranks, "do", _train, [3.0])
    place = f"{out}/version-00000001"
    wait_until(lambda: any((one / "lock").is_file() for one in out.glob(".version-00000001.*")), "the part of an export")
    wait_until(lambda: raystow.open(uri).root().open_exports == {place: 1}, "a note that it was begun")
    coordinator = coordinator_actor(uri.as_uri())
    wait_until(lambda: not _armed(coordinator), "another coordinator")
    assert not Path(place).exists()
    return ranks


def _armed(coordinator: Any) -> bool:
    """Whether the coordinator is still the one that will be killed."""

    def armed(coordinator: object) -> bool:
        module = importlib.import_module("raystow.orchestrator.export.version_files")
        return bool(module.write_index.__name__ == "die")

    try:
        return bool(ray.get(coordinator.__ray_call__.remote(armed), timeout=60))
    except ray.exceptions.RayError:
        return True


def _completed(uri: Path, out: Path) -> None:
    place = f"{out}/version-00000001"
    wait_until(lambda: _exports(uri) == {place: 1}, "an export")
    assert raystow.open(uri).root().open_exports == {}
    assert [path.name for path in out.iterdir()] == ["version-00000001"]
    assert (Path(place) / "model.safetensors.index.json").is_file()


@pytest.mark.long
def test_a_save_completes_an_export_of_a_killed_coordinator(tmp_path: Path) -> None:
    """Before that save becomes a version: rank 1 does not save."""
    uri, out = tmp_path / "run", tmp_path / "served"
    ranks = _killed_export(uri, out, 2)
    ray.get(ranks[0].set.remote(_state, 2.0))
    ray.get(ranks[0].save.remote(2))
    _completed(uri, out)
    assert [version.id for version in raystow.open(uri).versions()] == [1]


@pytest.mark.long
def test_close_completes_an_export_of_a_killed_coordinator(tmp_path: Path) -> None:
    uri, out = tmp_path / "run", tmp_path / "served"
    (rank,) = _killed_export(uri, out)
    ray.get(rank.leave.remote(), timeout=60)
    _completed(uri, out)


@pytest.mark.long
def test_another_run_completes_an_export_of_a_killed_coordinator(tmp_path: Path) -> None:
    """Without a save."""
    uri, out = tmp_path / "run", tmp_path / "served"
    (rank,) = _killed_export(uri, out)
    ray.kill(rank)
    start(str(uri), 1, export=raystow.Export(str(out), max_shard_size=20_000))
    _completed(uri, out)


@pytest.mark.long
def test_close_exports_a_version_pinned_after_the_last_save(tmp_path: Path) -> None:
    uri, out = tmp_path / "run", tmp_path / "served"
    (rank,) = start(str(uri), 1, export=raystow.Export(str(out), "pin:serve"))
    every([rank], "do", _train, [3.0])
    repository = raystow.open(uri)
    repository.pin(repository.version(1), "serve")
    ray.get(rank.leave.remote(), timeout=60)
    wait_until(lambda: [*_exports(uri).values()] == [1], "an export")


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"uri": "hdfs://a/b"}, "address"),
        ({"uri": "memory://a"}, "folder"),
        ({"uri": "out", "when": 0}, "when"),
        ({"uri": "out", "when": "worst"}, "when"),
        ({"uri": "out", "when": "pin:"}, "when"),
        ({"uri": "out", "dtype": "int8"}, "dtype"),
        ({"uri": "out", "max_shard_size": 0}, "max_shard_size"),
    ],
)
def test_an_invalid_export_is_refused(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(raystow.StateError, match=what):
        raystow.Export(**wrong)


@pytest.mark.parametrize(
    ("export", "what"),
    [
        ("s3://bucket/model", "export"),
        (raystow.Export("out", "best"), "keeps the best version"),
        (raystow.Export("out", tokenizer="nowhere"), "is not a folder"),
    ],
    ids=["text", "best without policy", "no folder"],
)
def test_a_checkpointer_refuses_such_an_export(tmp_path: Path, export: Any, what: str) -> None:
    with pytest.raises(raystow.StateError, match=what):
        raystow.Checkpointer(str(tmp_path / "run"), rank=0, world_size=1, export=export)
