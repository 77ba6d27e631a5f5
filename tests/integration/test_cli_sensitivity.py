"""``raystow sensitivity`` on a function of the user's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_runner import run, run_json

PROBE = """
import torch

def probe():
    torch.manual_seed(0)
    x, y = torch.randn(64, 40), torch.randn(64, 40)
    model = torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.Tanh(), torch.nn.Linear(80, 40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss():
        with torch.no_grad():
            return (model(x) - y).square().mean().item()

    def train(steps=2):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        return loss()

    train(20)
    return {"state": {"model": model.state_dict(), "optim": optimizer.state_dict()["state"]}, "loss": loss, "train": train}

def exact():
    weights = torch.linspace(1, 2, 5000)
    before = weights.clone()
    return {"state": {"weights": weights}, "loss": lambda: float((weights != before).sum())}

def wrong():
    return {"model": 1}

def asking(batches):
    return {}

def failing():
    open_the_batches()

def counting():
    return {"state": 1, "loss": float}

def losing(loss):
    return {**probe(), "loss": loss}

def lost():
    return losing(lambda: {}["batch"])

def without():
    return losing(lambda: None)

def number():
    return losing(2.5)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_probe.py").write_text(PROBE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_probe"


def test_it_prints_what_it_measured_and_what_to_pass(module: str) -> None:
    facts = run_json("sensitivity", f"{module}:probe", "--budget", 0.05)
    groups = {trial["group"] for trial in facts["trials"]}
    assert groups == {"exp_avg", "exp_avg_sq", "other.weights"}
    assert {*facts["proposal"]["rules"]} <= groups
    assert facts["proposal"]["change"] <= facts["budget"] == 0.05
    result = run("sensitivity", f"{module}:probe", "--budget", 0.05)
    assert "lossy={" in result.stdout
    for group, rule in facts["proposal"]["rules"].items():
        assert f'"{group}": {rule},' in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_it_says_that_no_rule_stays_within_the_budget(module: str) -> None:
    """With a loss that counts changed numbers: the loss of a trained model may change by exactly 0."""
    assert "no rule stays within" in run("sensitivity", f"{module}:exact", "--budget", 0).stdout


@pytest.mark.parametrize(
    ("source", "subject", "what"),
    [
        ("no_such_module:probe", "", "cannot be imported: No module named 'no_such_module'"),
        ("my_probe:none", "", "cannot be imported: module 'my_probe' has no attribute 'none'"),
        ("my_probe", "", "cannot be imported"),
        ("math:pi", "", "3.14159.* is not a function"),
        ("math:sqrt", "", "called without arguments, it raised TypeError: .*exactly one argument"),
        ("my_probe:asking", "", "called without arguments, it raised TypeError: .*'batches'"),
        ("my_probe:failing", "", "called without arguments, it raised NameError: .*'open_the_batches'"),
        ("my_probe:wrong", "", "returned {'model': 1}"),
        ("my_probe:counting", "", "returned the state 1"),
        ("my_probe:lost", "loss of ", "called without arguments, it raised KeyError: 'batch'"),
        ("my_probe:without", "loss of ", "returned None"),
        ("my_probe:number", "loss of ", "2.5 is not a function"),
    ],
)
def test_what_cannot_be_measured_is_said(module: str, source: str, subject: str, what: str) -> None:
    error = run_json("sensitivity", source, code=2)["error"]
    assert error["subject"] == subject + source
    assert re.match(what, error["what"])
    assert "function without arguments" in error["remedy"] or source == "my_probe:counting"


def test_where_it_was_raised_is_told_if_that_is_in_the_function(module: str) -> None:
    within = run("sensitivity", "my_probe:failing").stderr.splitlines()
    assert [line.split(", ")[-1] for line in within if line.startswith("  File")] == ["in failing"]
    assert within[-2].startswith("error: my_probe:failing: called without arguments, it raised NameError")
    assert len(run("sensitivity", "math:sqrt").stderr.splitlines()) == 2
