"""``raystow sensitivity`` on a function of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from shell import run, run_json

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

def wrong():
    return {"model": 1}
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
    assert "no rule stays within" in run("sensitivity", f"{module}:probe", "--budget", 0).stdout


@pytest.mark.parametrize("name", ["my_probe:wrong", "my_probe:none", "no_such_module:probe", "my_probe"])
def test_what_cannot_be_measured_is_said(module: str, name: str) -> None:
    result = run("sensitivity", name)
    assert result.exit_code == 2


def test_what_is_no_function_is_said() -> None:
    result = run("sensitivity", "math:pi")
    assert result.exit_code == 2
    assert "is not a function" in " ".join(result.stderr.split())
