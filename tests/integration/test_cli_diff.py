"""``raystow diff``: the changes between two versions, by digests and by comparing bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.colliding_tensors import colliding_tensors
from helpers.local_cluster import LocalCluster

from integration.cli_runner import run, run_json, without_packs
from raystow.state import assignment


def chunked_state(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    big = torch.randn(10, 1 << 19)  # 20 MiB in five chunks of two rows each
    return {"big": big, "half": torch.randn(100).bfloat16(), "same": torch.randn(50), "lr": 0.1, "epoch": 1, **changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four versions. The second changes two elements of one chunk of ``big`` and one element of ``half``. The third has other
    tensors. The fourth has half of each row of the second's ``big``, and its ``half``. Tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "llama"
    changed = chunked_state()["big"].clone()
    changed[4, :2] += torch.tensor([0.5, -2.0])
    half = chunked_state()["half"].clone()
    half[7] = float("nan")
    second = chunked_state(big=changed, half=half, epoch=2)
    third = {key: value for key, value in second.items() if key not in ("half", "lr")}
    third |= {"same": torch.zeros(50, dtype=torch.float64), "new": torch.ones(7), "seen": "all"}
    with LocalCluster(str(folder)) as local:
        local.repository.pin(local.save(chunked_state(), step=100), "first")
        local.save(second, step=200)
        local.save(third, step=300)
        local.save({"big": changed[:, : 1 << 18].clone(), "half": half}, step=400)
    return folder


def by_name(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in facts["tensors"]}


def test_digests_identify_the_changed_chunks(folder):
    facts = run_json("diff", folder, "first", 2)
    assert (facts["before"], facts["after"]) == ({"version": 1, "step": 100}, {"version": 2, "step": 200})
    assert (facts["different"], facts["deep"]) == (True, False)
    assert facts["summary"] == {"added": 0, "removed": 0, "changed": 2, "layout": 0, "same": 1}
    assert [row["name"] for row in facts["tensors"]] == ["big", "half"]  # the most changed bytes first
    big = by_name(facts)["big"]
    assert (big["what"], big["dtype"], big["bytes"]) == ("changed", "float32", 20 << 20)
    assert (big["chunks"], big["changed_chunks"], big["changed_bytes"], big["share"]) == (5, 1, 4 << 20, 0.2)
    assert (big["changed_elements"], big["max_difference"]) == (None, None)
    assert facts["values"] == {"added": [], "removed": [], "changed": ["epoch"]}


def test_deep_reports_the_size_of_each_change(folder):
    facts = run_json("diff", folder, 1, 2, "--deep")
    big, half = by_name(facts)["big"], by_name(facts)["half"]
    assert (big["changed_elements"], big["changed_bytes"]) == (2, 8)
    assert big["max_difference"] == pytest.approx(2.0, abs=1e-6)
    assert (half["changed_elements"], half["changed_bytes"]) == (1, 2)
    assert (half["max_difference"], half["undefined_differences"]) == (None, 1)


def test_digests_need_no_pack_and_deep_reads_few_chunks(folder, tmp_path):
    """The copy has no packs, so a deep comparison fails only if it must read a chunk."""
    copy = without_packs(folder, tmp_path / "copy")
    assert run_json("diff", copy, 1, 2)["tensors"] == run_json("diff", folder, 1, 2)["tensors"]
    assert run_json("diff", copy, 2, 2, "--deep")["different"] is False
    assert run_json("diff", copy, 1, 2, "--deep", code=3)["error"]["kind"] == "Damaged"


def test_added_removed_and_reshaped_tensors_are_reported(folder):
    facts = run_json("diff", folder, 2, 3, "--deep")
    rows = by_name(facts)
    assert {name: (row["what"], row["changed_bytes"]) for name, row in rows.items()} == {
        "same": ("changed", 400),
        "half": ("removed", 200),
        "new": ("added", 28),
    }
    assert (rows["same"]["how"], rows["same"]["share"]) == ("float32 -> float64", 1.0)
    assert facts["values"] == {"added": ["seen"], "removed": ["lr"], "changed": []}
    assert by_name(run_json("diff", folder, 3, 4))["big"]["how"] == "10 x 524288 -> 10 x 262144"


def test_a_changed_layout_is_reported_and_deep_compares_it(tmp_path, monkeypatch):
    full = torch.arange(6 * (1 << 19), dtype=torch.float32).reshape(6, 1 << 19)
    other = full.clone()
    other[5, 3] += 0.25
    with LocalCluster(str(tmp_path)) as local:
        local.save({"w": full}, step=1)
        monkeypatch.setattr(assignment, "HOST_CHUNK", 2 << 20)  # simulates the different chunk sizes of CPU and GPU
        local.save({"w": full}, step=2)
        local.save({"w": other}, step=3)
    quick = run_json("diff", tmp_path, 1, 2)
    row = by_name(quick)["w"]
    assert (row["what"], row["changed_bytes"], row["share"], quick["different"]) == ("layout", None, None, True)
    text = run("diff", tmp_path, 1, 2).stdout
    assert "layout differs: other chunks or other stored bytes; --deep compares the tensors" in text
    assert run("diff", tmp_path, 1, 2, "--exit-code").exit_code == 7
    deep = run_json("diff", tmp_path, 1, 2, "--deep", "--exit-code")
    assert (deep["different"], deep["summary"]["same"]) == (False, 1)
    row = by_name(run_json("diff", tmp_path, 1, 3, "--deep"))["w"]
    assert (row["changed_elements"], row["max_difference"]) == (1, 0.25)


def test_tensors_of_colliding_digests_are_read_by_deep(tmp_path):
    """The 64-bit digests in the manifests are equal. A frozen tensor is referenced by later versions, and is the same."""
    frozen, (one, other) = torch.randn(20_000), map(torch.from_numpy, colliding_tensors())
    with LocalCluster(str(tmp_path), delta="auto") as local:
        for step, value in enumerate((one, other, other)):
            local.save({"w": value, "frozen": frozen}, step=step)
    quick = run_json("diff", tmp_path, 1, 2)
    assert (quick["different"], quick["summary"]["layout"], quick["summary"]["same"]) == (True, 1, 1)
    assert run("diff", tmp_path, 1, 2, "--exit-code").exit_code == 7
    for later in (2, 3):
        deep = run_json("diff", tmp_path, 1, later, "--deep", "--exit-code", code=7)
        assert by_name(deep)["w"]["changed_elements"] == 128
        assert deep["summary"] == {"added": 0, "removed": 0, "changed": 1, "layout": 0, "same": 1}
    assert run("diff", tmp_path, 2, 3, "--exit-code").exit_code == 0


def test_the_text_output_fits_80_columns(folder):
    result = run("diff", folder, 1, 2)
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "version 1 (step 100) -> version 2 (step 200)"
    assert lines[2].split() == ["NAME", "WHAT", "CHUNKS", "CHANGED", "SHARE"]
    assert lines[3].split() == ["big", "changed", "1/5", "4.00", "MiB", "20.0", "%"]
    assert lines[5:] == ["3 tensors: 2 changed, 1 the same", "1 plain value changed: epoch"]
    deep = [line.split() for line in run("diff", folder, 1, 2, "--deep").stdout.splitlines()]
    assert deep[2] == ["NAME", "WHAT", "CHANGED", "SHARE", "MAX", "DIFF"]
    assert deep[3] == ["big", "changed", "8", "B", "<", "0.01", "%", "2"]
    assert deep[4] == ["half", "changed", "2", "B", "1.00", "%", "-", "(1", "inf/nan)"]
    for words in (("first", 3), (2, 4), (1, 2, "--deep")):
        lines = run("diff", folder, *words).stdout.splitlines()
        assert max(map(len, [lines[0], *lines[2:]])) <= 80


def test_long_lists_are_cut_and_names_are_escaped(tmp_path):
    names = [f"model.layers.{i}." + "very_long_name" * 8 for i in range(30)]
    with LocalCluster(str(tmp_path)) as local:
        local.save({"\x1b[31mevil": torch.ones(3)}, step=1)
        local.save({name: torch.ones(3 + i) for i, name in enumerate(names)}, step=2)
    shown = run("diff", tmp_path, 1, 2, "--top", 3).stdout
    assert "(and 28 more: --all lists them)" in shown
    assert "layers.29" in shown  # the largest tensor
    assert "layers.2." not in shown
    everything = run("diff", tmp_path, 1, 2, "--all").stdout
    assert ("layers.2." in everything, "--all" in everything, "\x1b" in everything) == (True, False, False)
    lines = everything.splitlines()
    assert max(map(len, [lines[0], *lines[2:]])) <= 80


def test_exit_codes_report_differences_and_errors(folder):
    assert run("diff", folder, 1, 2).exit_code == 0
    assert run("diff", folder, 1, 2, "--exit-code").exit_code == 7
    assert run("diff", folder, 1, "first", "--exit-code").exit_code == 0
    assert run("diff", folder, 4, "--exit-code").exit_code == 0  # V2 defaults to the latest version
    assert run_json("diff", folder, 1, 9, code=4)["error"]["kind"] == "NotFound"
    assert run("diff", folder).exit_code == 2


def test_help_has_an_example_and_fits_80_columns():
    result = run("diff", "--help")
    assert "Example:  raystow diff s3://" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
