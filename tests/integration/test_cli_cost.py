"""``raystow cost``: the monthly cost, computed from the user's prices."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster

from integration.cli_runner import run, run_json
from integration.training_states import training
from raystow.cli.pricing import savings
from raystow.storage.format.root import Entry
from raystow.storage.repository import create_repository, open_repository
from raystow.storage.retention.policy import Policy

# "Cut Checkpoint Costs with About 30 Lines of Python and NVIDIA nvCOMP", NVIDIA Technical Blog, April 2026: a 70B model has
# checkpoints of 782 GB, one every 30 minutes, written at 5 GB/s while 8 B200 at $4.40 an hour wait. Dense models get 1.27 times
# smaller. The article counts no price of storage.
SAVES = ("--state", "782GB", "--ratio", "1.27x", "--every", "30m", "--write-rate", "5GB")
ARTICLE = (*SAVES, "--gpu-price", 4.40, "--store-price", 0)


def test_costs_equal_the_example_of_nvidias_article():
    without = run_json("cost", *ARTICLE, "--gpus", 8)["without"]
    assert without["stall"] == pytest.approx(156.4)  # "782 GB / 5 GB/s = 156.4 seconds"
    assert without["written"] / without["stored"] == pytest.approx(1440)  # "48 checkpoints per day", for 30 days
    assert round(without["written"] / 1e15, 2) == 1.13  # "1.13 PB"
    assert without["gpu_dollars"] == pytest.approx(156.4 / 3600 * 8 * 4.40 * 1440)
    assert 2200 < without["gpu_dollars"] < 2210  # "over $2,200 a month"
    assert 17_500 < run_json("cost", *ARTICLE, "--gpus", 64)["without"]["gpu_dollars"] < 17_700  # "over $17,500"
    large = run_json("cost", *ARTICLE, "--state", f"{782 * 405 / 70}GB", "--gpus", 128)  # "can cost $200,000"
    assert 200_000 < large["without"]["gpu_dollars"] < 205_000


def test_the_text_output_has_the_figures_of_the_article():
    result = run("cost", *ARTICLE, "--gpus", 8)
    assert result.exit_code == 0, result.output
    cells = {line[:17].strip(): line[17:].split() for line in result.stdout.splitlines()}
    assert cells["stall of a save"] == ["2.61", "min", "2.05", "min", "33.3", "s"]
    assert cells["written a month"] == ["1.13", "PB", "887", "TB", "239", "TB"]
    assert cells["GPUs, a month"] == ["$2,202", "$1,734", "$468.17"]
    assert "compression saves $468.17 a month, 21.3 %" in result.stdout
    assumed = " ".join(result.stdout.split())
    for words in ("30 days", "1,440 saves", "782 GB", "at 5.00 GB per second", "8 GPUs at $4.40 an hour", "costs $0.00 a month"):
        assert words in assumed
    assert max(map(len, result.stdout.splitlines())) <= 80


HABIT = ("--gpus", 8, "--gpu-price", 4, "--store-price", 0.02, "--every", "1h", "--state", "100GB", "--ratio", 0.75, "--keep", 5)


def test_store_and_gpu_costs_are_added():
    facts = run_json("cost", *HABIT, "--stall", 10, "--stall-compressed", 4)
    without, coded, saved = facts["without"], facts["with"], facts["saved"]
    assert (without["kept"], coded["kept"], saved["kept"]) == (500e9, 375e9, 125e9)
    assert (without["store_dollars"], coded["store_dollars"]) == (pytest.approx(10.0), pytest.approx(7.5))
    assert (without["stalled"], coded["stalled"]) == (7200, 2880)
    assert (without["gpu_hours"], coded["gpu_hours"]) == (pytest.approx(16), pytest.approx(6.4))
    assert saved["dollars"] == pytest.approx(2.5 + 9.6 * 4)
    assert facts["pays"] is True


def test_compression_that_costs_more_than_it_saves_is_reported():
    slower = ("--stall", 1, "--stall-compressed", 3)
    result = run("cost", *HABIT, *slower)
    text = " ".join(result.stdout.split())
    assert "compression does not pay: it saves $2.50 of storage and costs $12.80 of GPU time a month" in text
    assert max(map(len, result.stdout.splitlines())) <= 80
    facts = run_json("cost", *HABIT, *slower)
    assert (facts["pays"], facts["saved"]["dollars"]) == (False, pytest.approx(-10.3))
    # Two more seconds per save cost 12.80 dollars, so the storage savings pay for 0.39 seconds.
    assert facts["break_even"] == pytest.approx(2 * 2.5 / 12.8)
    assert "the saving in the store pays for 391 ms more stall per save" in result.stdout
    assert run_json("cost", *HABIT, "--stall", 1, "--stall-compressed", 1.39)["pays"] is True
    assert run_json("cost", *HABIT, "--stall", 1, "--stall-compressed", 1.40)["pays"] is False
    assert run_json("cost", *ARTICLE, "--gpus", 8, "--code-rate", "4GB")["pays"] is False
    nothing = run("cost", *HABIT, "--stall", 1, "--stall-compressed", 1, "--ratio", 1)
    assert "compression does not pay: it saves nothing" in nothing.stdout


def test_the_stall_is_the_slower_of_coding_and_writing():
    def stalls(*words: object) -> tuple[float, float]:
        facts = run_json("cost", *HABIT, "--write-rate", "5GB", *words)
        return facts["without"]["stall"], facts["with"]["stall"]

    assert stalls() == (20, 15)
    assert stalls("--code-rate", "50GB") == (20, 15)
    assert stalls("--code-rate", "2GB") == (20, 50)


PRICES = ("--gpus", 8, "--gpu-price", 4, "--store-price", 0.02, "--every", "1h", "--write-rate", "5GB")


def test_state_ratio_and_versions_come_from_a_repository(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path)) as local:
        for step, size in ((1, 100), (2, 300)):
            local.save({"w": torch.randn(size, 100).bfloat16()}, step=step)
    first, newest = open_repository(str(tmp_path)).versions()
    facts = run_json("cost", tmp_path, *PRICES)
    assert (facts["uri"], facts["version"]) == (tmp_path.as_uri(), 2)
    assert (facts["without"]["stored"], facts["without"]["kept"]) == (newest.raw, 2 * newest.raw)
    assert facts["with"]["stored"] == pytest.approx(newest.raw * (first.bytes + newest.bytes) / (first.raw + newest.raw))
    assert (facts["with"]["kept"], facts["savings"]) == (first.bytes + newest.bytes, [])
    own = run_json("cost", tmp_path, *PRICES, "--state", "1GB", "--ratio", "2x", "--keep", 1)
    assert (own["without"]["kept"], own["with"]["kept"]) == (1e9, 5e8)


def test_a_repository_supplies_all_inputs_but_the_prices(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path)) as local:
        for step in (1, 2):
            local.save({"w": torch.randn(100, 100).bfloat16()}, step=step, stall=1e-6 * step)
    first, newest = open_repository(str(tmp_path)).versions()
    facts = run_json("cost", tmp_path)
    saves = 30 * 86400 / (newest.created - first.created)
    assert facts["with"]["stall"] == facts["without"]["stall"] == pytest.approx(1.5e-6, abs=1e-6)
    assert facts["with"]["written"] == pytest.approx(saves * newest.raw * (first.bytes + newest.bytes) / (first.raw + newest.raw))
    assert facts["with"]["kept"] == first.bytes + newest.bytes
    assumed = " ".join(facts["assumptions"])
    for words in ("the median of those recorded", "1 GPU at $4.40 an hour", "costs $0.023 a month"):
        assert words in assumed


def test_the_savings_of_each_technique_are_reported(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path), delta=2) as local:
        for step, state in enumerate(itertools.islice(training(), 6)):
            local.save(state, step=step)
    repository = open_repository(str(tmp_path))
    repository.plan_retention(Policy(resumable=3)).execute()
    facts = run_json("cost", tmp_path, *PRICES)
    entries = repository.root().versions
    assert [(bool(entry.groups), entry.bases) for entry in entries] == [
        *((True, base) for base in [(), (1,), (1,)]),
        *((False, base) for base in [(), (4,), (4,)]),
    ]
    assert facts["with"]["kept"] == sum(entry.stored for entry in entries)
    derived, delta, thinning = facts["savings"]
    assert [one["technique"] for one in facts["savings"]] == ["derived", "delta", "thinning"]
    assert (derived["stored"], derived["instead"]) == (0, 600 * 500 * 2)
    assert delta["stored"] == sum(entry.stored for entry in entries if entry.bases)
    assert delta["stored"] < 0.85 * delta["instead"]
    assert "restoring one reads 1." in delta["explanation"]
    assert thinning["stored"] == sum(entry.stored for entry in entries[:3])
    assert thinning["instead"] == pytest.approx(sum(entry.stored for entry in entries[3:]), abs=3)
    text = " ".join(run("cost", tmp_path, *PRICES).stdout.split())
    assert "- delta: 4 deltas between versions: " in text
    assert max(map(len, run("cost", tmp_path, *PRICES).stdout.splitlines())) <= 80
    assert "savings" in run_json("cost", tmp_path, *PRICES, "--keep", 2)


def test_deltas_that_save_too_little_are_discouraged() -> None:
    entries = [Entry(1, "", "", 0, 0, 0.0, 200, 100), Entry(2, "", "", 0, 0, 0.0, 200, 97, (1,))]
    (saving,) = savings(entries, 0)
    assert saving.explanation.endswith("they do not pay here, use `delta=0`")


def test_an_empty_repository_has_no_size(tmp_path: Path) -> None:
    create_repository(str(tmp_path))
    assert run_json("cost", tmp_path, *PRICES, code=4)["error"]["kind"] == "NotFound"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (PRICES, "--state 782GB"),
        ((*PRICES, "--state", 0, "--ratio", 1), "--state 782GB"),
        ((*HABIT, "--gpu-price", "inf", "--write-rate", "5GB"), "finite"),
        ((*HABIT, "--stall", 1), "--stall-compressed"),
        ((*HABIT, "--stall", 1, "--stall-compressed", 1, "--write-rate", "5GB"), "--write-rate"),
        ((*HABIT, "--write-rate", "0"), "--write-rate"),
        ((*HABIT, "--write-rate", "10MB"), "save less often"),
        ((*HABIT, "--ratio", "1.27", "--write-rate", "5GB"), "1.25x"),
        ((*HABIT, "--ratio", "0", "--write-rate", "5GB"), "1.25x"),
        ((*HABIT, "--every", "0s", "--write-rate", "5GB"), "save less often"),
        (HABIT[2:], "--gpus"),
    ],
)
def test_missing_and_invalid_options_are_reported(words: tuple[Any, ...], remedy: str) -> None:
    result = run("cost", *words)
    assert (result.exit_code, remedy in " ".join(result.stderr.replace("│", " ").split())) == (2, True), result.stderr


def test_help_has_an_example_and_fits_80_columns() -> None:
    result = run("cost", "--help")
    assert "Example:  raystow cost s3://" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


MANY = "9" * 400


@pytest.mark.parametrize(
    "words", [("--gpus", MANY), ("--keep", MANY), ("--gpu-price", "1e308"), ("--stall", "1e308"), ("--state", MANY[:300])]
)
def test_numbers_too_large_to_calculate_with_are_refused(words: tuple[str, str]) -> None:
    given = {"--gpus": "8", "--every": "1h", "--state": "1GB", "--ratio": "0.5", "--stall": "1", "--stall-compressed": "1"}
    result = run("cost", *(word for option in ({**given, words[0]: words[1]}).items() for word in option), "--json")
    assert result.exit_code == 2, result.output
    assert words[0] in result.stderr
