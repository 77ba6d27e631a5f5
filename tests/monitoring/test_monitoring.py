"""The metrics and log lines of a real run, and the dashboard and the alert rules that use them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from monitoring import promql
from monitoring.measured_run import exported
from raystow.storage.runtime.metrics import METRICS, MetricKind

pytestmark = pytest.mark.s3

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "monitoring" / "grafana" / "raystow.json").read_text())
RULES = yaml.safe_load((ROOT / "monitoring" / "prometheus" / "raystow.rules.yaml").read_text())
Labels = dict[str, set[str]]


@pytest.fixture(scope="module")
def measured(s3_bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run ``measured_run.py``, and return its folder; ``driver.err`` has the log of its driver."""
    folder = tmp_path_factory.mktemp("measured")
    tests = ROOT / "tests"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), str(ROOT)]),
        "RAY_LOGGING_CONFIG_ENCODING": "JSON",
        "RAY_AUTH_MODE": "disabled",
    }
    program = [
        sys.executable,
        str(Path(__file__).with_name("measured_run.py")),
        f"s3://{s3_bucket}/{folder.name}/run",
        str(folder),
    ]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    (folder / "driver.err").write_text(ended.stderr)
    return folder


@pytest.fixture(scope="module")
def labels(measured: Path) -> Labels:
    """Return the labels of each exported series."""
    found: Labels = defaultdict(set)
    for family in text_string_to_metric_families((measured / "metrics.txt").read_text()):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return found


def lines(measured: Path) -> list[dict[str, Any]]:
    """Return raystow's log lines of all processes."""
    texts = [line for path in measured.glob("*.err") for line in path.read_text().splitlines() if line.startswith("{")]
    return [line for line in map(json.loads, texts) if "repository" in line or "version" in line]


@pytest.mark.long
def test_every_metric_is_exported_with_its_tags(measured: Path, labels: Labels) -> None:
    assert {metric.name for metric in METRICS} <= exported((measured / "metrics.txt").read_text())
    suffix = {MetricKind.COUNTER: "_total", MetricKind.GAUGE: "", MetricKind.HISTOGRAM: "_bucket"}
    for metric in METRICS:
        assert {*metric.tags} <= labels[f"ray_{metric.name}{suffix[metric.kind]}"], metric.name


@pytest.mark.long
def test_the_values_match_the_run(measured: Path) -> None:
    values: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families((measured / "metrics.txt").read_text()):
        for sample in family.samples:
            values[sample.name.removeprefix("ray_raystow_")] += sample.value
    assert (values["versions_total"], values["aborted_attempts_total"], values["failed_saves_total"]) == (4, 1, 1)
    assert (values["stale_saves_total"], values["damaged_versions_total"]) == (1, 1)
    assert (values["durable_seconds_count"], values["restore_seconds_count"]) == (5, 1)
    assert values["raw_bytes_total"] == 4 * 300_000 * 4
    assert 0 < values["stored_bytes_total"] < values["raw_bytes_total"]
    assert values["uploaded_bytes_total"] > values["stored_bytes_total"]  # the manifest is included
    assert values["store_retries_total"] >= 1
    assert values["stall_seconds_total"] > 0
    assert values["connected_ranks"] == 1
    assert values["durable_step"] == 5 < values["recorded_step"] < 19
    assert values["unrecorded_steps_total"] >= 2


def expressions() -> list[tuple[str, str]]:
    panels = [(p["title"], target["expr"]) for p in DASHBOARD["panels"] for target in p.get("targets", ())]
    return panels + [(rule["alert"], rule["expr"]) for group in RULES["groups"] for rule in group["rules"]]


@pytest.mark.long
def test_dashboard_and_alerts_use_only_exported_series(labels: Labels) -> None:
    expected = re.fullmatch(r"label_values\((\w+), (\w+)\)", DASHBOARD["templating"]["list"][1]["query"]["query"])
    assert expected is not None
    assert expected[2] in labels[expected[1]]
    for title, expression in expressions():
        text = expression.replace("$__rate_interval", "5m").replace("$repository", ".*")
        for name, matched in promql.selectors(text):
            assert name in labels, f"{title}: {name}"
            assert matched <= labels[name], f"{title}: {matched}"
        for names, kept in promql.grouped(text):
            assert all(kept <= labels[name] for name in names), f"{title}: {kept}"


def test_each_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    text = " ".join(expression for _, expression in expressions())
    assert [metric.name for metric in METRICS if not re.search(rf"ray_{metric.name}(_total|_bucket)?\b", text)] == []


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for spot in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert taken.setdefault(spot, panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_alerts_pass_their_promtool_tests() -> None:
    for words in (["check", "rules", "raystow.rules.yaml"], ["test", "rules", "raystow.test.yaml"]):
        ended = subprocess.run(["promtool", *words], cwd=ROOT / "monitoring" / "prometheus", capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_document_has_every_metric() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    for metric in METRICS:
        name = f"ray_{metric.name}" + ("_total" if metric.kind is MetricKind.COUNTER else "")
        row = next((line for line in text.splitlines() if line.startswith(f"| `{name}`")), "")
        assert row, name
        named_as_histogram = name.endswith("_seconds") and "timestamp" not in name
        assert (metric.kind is MetricKind.HISTOGRAM) == named_as_histogram, f"{name}: the document derives kinds from names"
        assert all(f"`{tag}`" in row for tag in metric.tags), name
    for rule in (rule for group in RULES["groups"] for rule in group["rules"]):
        assert f"`{rule['alert']}`" in text, rule["alert"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (r"^version 1, step 1: \d+ bytes stored", {"version": 1, "step": 1}),  # the coordinator
        (r"the save of step 3 was given up", {"version": 3, "step": 3}),
        (r"the save of step 3 failed", {"step": 3, "rank": 0}),  # the training process
        (r"two saves hold the same optimizer state", {"step": 2}),  # the node worker
        (r"IS DAMAGED, falling back", {"version": 5, "step": 5}),
        (r"^restoring version 4", {"version": 4, "step": 4, "rank": 0}),
        (r"^this rank's restore has read", {"rank": 0}),
        (r"is not recorded, nor are later ones .* is full", {"rank": 0}),
    ],
)
def test_log_lines_have_step_rank_and_version_fields(measured: Path, text: str, fields: dict[str, Any]) -> None:
    found = [line for line in lines(measured) if re.search(text, line["message"])]
    assert found, f"no line says {text!r}"
    for line in found:
        assert {name: line.get(name) for name in fields} == fields
        assert line["repository"].startswith("s3://")
        assert len(line["node"]) == 56
        assert "attempt" in line or "version" not in fields
