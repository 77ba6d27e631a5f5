"""``raystow plan`` on a repository of two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster
from helpers.no_ray import refuse_cluster

import raystow
from integration.cli_runner import run, run_json, without_packs
from raystow.orchestrator.restore.what_if import plan_world
from raystow.storage.errors import ClusterError, StateError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a tensor of five chunks, a small tensor and a value. Tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "llama"
    state = {"big": torch.randn(10, 1 << 19), "small": torch.randn(1000), "lr": 0.1}
    with LocalCluster(str(folder), nodes=2) as local:
        local.repository.pin(local.save_all([state, state], step=100), "first")
        local.save_all([state, state], step=200)
    return folder


def test_plan_reports_the_reads_of_each_rank(folder):
    facts = run_json("plan", folder, "--world", 4, "--per-node", 2)
    assert (facts["version"], facts["step"], facts["saved_by"], facts["world"]) == (2, 200, 2, 4)
    assert facts["assumption"].startswith("a tensor saved in several boxes")
    # torch.chunk splits ten rows into 3, 3, 3 and 1; a chunk has two rows. All ranks read the small tensor.
    assert [rank["chunks"] for rank in facts["ranks"]] == [3, 3, 3, 2]
    assert [node["chunks"] for node in facts["nodes"]] == [4, 3]
    assert facts["bytes"] == facts["stored"]
    assert facts["amplification"] == 1.0
    assert facts["seconds"] == round(max(node["bytes"] for node in facts["nodes"]) / 1e9, 3)


def test_chunks_of_two_nodes_are_read_once_and_passed_on(folder):
    facts = run_json("plan", folder, "first", "--world", 10, "--per-node", 1, "--rate", "1MB", "--peer-rate", "2MB")
    assert facts["version"] == 1
    assert facts["amplification"] == pytest.approx(1, rel=0.01)  # each node needs one row, and each chunk has two
    assert facts["passed_on"] == pytest.approx(facts["stored"], rel=0.01)
    assert sum(node["bytes"] for node in facts["nodes"]) == pytest.approx(facts["bytes"] + facts["passed_on"], abs=10)
    node = max(facts["nodes"], key=lambda node: node["bytes"])
    seconds = (node["bytes"] - node["passed_on"]) / 1e6 + node["passed_on"] / 2e6
    assert facts["seconds"] == pytest.approx(seconds, rel=0.01)
    wide = run_json("plan", folder, "--world", 2, "--per-node", 1, "--replicated")
    assert [node["bytes"] for node in wide["nodes"]] == [wide["stored"]] * 2
    assert (wide["bytes"], wide["passed_on"]) == (wide["stored"], pytest.approx(wide["stored"], abs=2))
    assert wide["assumption"] == "every rank reads every tensor whole"


def test_a_plan_of_too_many_reads_is_refused(folder):
    version = raystow.open(folder).latest()
    assert plan_world(version, 10, per_node=8, most_reads=20).nodes
    with pytest.raises(StateError, match=r"100 ranks would read more than 20 chunks \(plan for fewer ranks\)"):
        plan_world(version, 100, per_node=8, whole=True, most_reads=20)


def test_the_text_output_is_a_table_with_the_assumption(folder):
    text = run("plan", folder, "--world", 3, "--per-node", 2).stdout
    assert "version 2 (step 200) onto 3 ranks, 2 per node" in text
    assert "saved by 2 ranks; assumption: a tensor saved in several boxes" in text
    assert "each rank  bytes" in text
    assert "1.000 times what is needed" in text


def test_the_default_world_size_is_that_of_the_save(folder):
    assert run_json("plan", folder)["world"] == 2


def test_invalid_arguments_are_refused(folder):
    assert run("plan", folder, "--world", 0).exit_code == 2
    assert run("plan", folder, "--rate", "0").exit_code == 2
    assert run("plan", folder, "--rate", "fast").exit_code == 2
    assert run("plan", folder, "--peer-rate", "0").exit_code == 2
    assert run_json("plan", folder, "7", code=4)["error"]["kind"] == "NotFound"


def test_plan_tells_why_no_node_was_asked(folder, monkeypatch):
    refuse_cluster(monkeypatch, ClusterError("the Ray cluster refuses this process, which shows no valid token"))
    assert "were not asked: the Ray cluster refuses this process" in run("plan", folder, columns=500).stdout
    journal = run_json("plan", folder)["journal"]
    assert (journal["cluster"], journal["why_not"]) == (False, "the Ray cluster refuses this process, which shows no valid token")


def test_plan_reads_no_pack(folder, tmp_path):
    copy = without_packs(folder, tmp_path / "copy")
    assert run_json("plan", copy, "--world", 4)["bytes"] > 0
