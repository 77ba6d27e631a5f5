"""Traces of a real cluster, with Ray's own spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.example_runs import run_example


def _spans(folder: Path) -> dict[str, dict[str, Any]]:
    """The spans of all processes by id, each with its process."""
    lines = [(file.stem, line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    spans = [{**json.loads(line), "process": process} for process, line in lines]
    return {span["context"]["span_id"]: span for span in spans}


@pytest.mark.long
def test_ranks_worker_and_coordinator_share_a_trace(tmp_path: Path) -> None:
    assert "all ranks have restored step 1" in run_example("traced_training.py", tmp_path / "traced", cwd=tmp_path)
    spans = _spans(tmp_path / "traced" / "traces")
    named = {name: [span for span in spans.values() if span["name"] == f"raystow.{name}"] for name in ("save", "restore")}

    def above(span: dict[str, Any]) -> list[str]:
        parent = spans.get(span["parent_id"])
        return [] if parent is None else [parent["name"], *above(parent)]

    def below(span: dict[str, Any]) -> list[dict[str, Any]]:
        children = [one for one in spans.values() if one["parent_id"] == span["context"]["span_id"]]
        return [span, *(one for child in children for one in below(child))]

    for name, of_nodes, steps in (
        ("save", {"save.node", "save.code", "save.upload"}, {"save.plan", "save.stage", "save.commit", "housekeeping"}),
        ("restore", set[str](), {"restore.agree", "restore.plan", "restore.read", "restore.fetch", "restore.decode"}),
    ):
        (root,) = named[name]
        assert above(root) == ["Trainer.train ray.remote_worker", "Trainer.train ray.remote", "training"]
        found = [span for span in below(root) if span["name"].startswith("raystow.")]
        names = {span["name"].removeprefix("raystow.") for span in found}
        assert names == {name, f"{name}.rank", *of_nodes, *steps}
        ranks = {span["process"] for span in found if span["name"] == f"raystow.{name}.rank"}
        nodes = {span["process"] for span in found if span["name"] == "raystow.save.node"}
        assert len(ranks) == 2
        assert len({root["process"], *ranks, *nodes}) == 3 + bool(of_nodes)
