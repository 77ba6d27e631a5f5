"""The command line on real repositories: ``ls``, ``show``, ``restore``, ``doctor`` and errors."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import memory_repository
from helpers.local_cluster import LocalCluster
from helpers.system_calls import SystemCalls
from safetensors.torch import load_file

from integration.cli_runner import flip_byte, run, run_json
from raystow import __version__
from raystow.cli import output
from raystow.cli.checks import hardware, software
from raystow.orchestrator.export import safetensors_file, version_files
from raystow.storage.errors import Damaged, UnsafeStore
from raystow.storage.format import values
from raystow.storage.repository import create_repository, open_repository
from raystow.storage.versions.version import TensorInfo


def mixed_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {
            "embed": torch.randn(600, 100).bfloat16(),
            "bias": torch.randn(100),
            "scale": torch.tensor(1.5, dtype=torch.float64),
            "none": torch.empty(0, 3),
            "mask": torch.tensor([True, False, True]),
            "fp8": torch.randn(7, 3).to(torch.float8_e4m3fn),
        },
        "optimizer": {"exp_avg": torch.randn(600, 100), "step": torch.tensor(seed)},
        "rng": np.arange(625, dtype=np.uint32),
        "rotary": torch.randn(3, 2, dtype=torch.complex128),
        "epoch": seed,
        "lr": 3e-4,
        "seen": b"\x00\xff",
        "worst": float("nan"),
    }


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of three versions: the second is pinned, and the third has two ranks. Tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "llama"
    with LocalCluster(str(folder)) as local:
        local.save(mixed_state(1), step=100, metrics={"loss": 2.75})
        local.repository.pin(local.save(mixed_state(2), step=200, metrics={"loss": float("inf")}), "best")
        local.save_all([mixed_state(3), mixed_state(3) | {"epoch": 4}], step=300, metrics={"loss": 2.25})
    return folder


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A repository of two versions that a test may damage."""
    with LocalCluster(str(tmp_path / "run")) as local:
        for step in (1, 2):
            local.save({"w": torch.randn(100, 100), "optim": {"m": torch.randn(50)}}, step=step)
    return tmp_path / "run"


# ls


def test_ls_lists_versions_and_pins(run_folder: Path) -> None:
    result = run("ls", run_folder)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0].split() == ["ID", "STEP", "CREATED", "RAW", "STORED", "RATIO", "PINS"]
    assert [line.split()[:2] for line in lines[1:4]] == [["1", "100"], ["2", "200"], ["3", "300"]]
    assert lines[2].rstrip().endswith("best")
    assert max(map(len, lines)) <= 80


def test_ls_json_describes_every_version(run_folder: Path) -> None:
    listing = run_json("ls", run_folder)
    repository = open_repository(str(run_folder))
    assert (listing["uri"], listing["repository"]) == (run_folder.as_uri(), repository.id)
    for row, version in zip(listing["versions"], repository.versions(), strict=True):
        assert (row["id"], row["step"], row["created"]) == (version.id, version.step, version.created)
        assert (row["raw"], row["stored"]) == (version.raw, version.bytes)
        assert row["ratio"] == pytest.approx(version.bytes / version.raw, abs=1e-4)
        assert "world_size" not in row
    assert [row["pins"] for row in listing["versions"]] == [[], ["best"], []]
    assert [row["world_size"] for row in run_json("ls", run_folder, "--long")["versions"]] == [1, 1, 2]


def test_ls_reads_no_version_record(run_folder: Path, tmp_path: Path) -> None:
    for name in ("raystow.json", "root.json"):
        (tmp_path / name).write_bytes((run_folder / name).read_bytes())
    assert run("ls", tmp_path).exit_code == 0
    assert run("ls", tmp_path, "--long").exit_code == 3


def test_an_empty_repository_has_no_versions(tmp_path: Path) -> None:
    create_repository(str(tmp_path))
    assert "no version yet" in run("ls", tmp_path).stdout
    assert run_json("ls", tmp_path)["versions"] == []
    assert run("show", tmp_path).exit_code == 4
    assert run_json("verify", tmp_path, "--all")["versions"] == []


# show


def test_show_reports_the_contents_of_a_version(run_folder: Path) -> None:
    facts = run_json("show", run_folder)
    version = open_repository(str(run_folder)).version(3)
    infos = version.tensors()
    assert (facts["id"], facts["step"], facts["world_size"], facts["nodes"]) == (3, 300, 2, 1)
    assert facts["metrics"] == {"loss": 2.25}
    assert facts["writer"] == {"raystow": __version__}
    assert (facts["tensors"], facts["values"]) == (len(infos), 4)
    for key, of in (("groups", lambda i: i.group), ("dtypes", lambda i: i.dtype)):
        assert sum(share["tensors"] for share in facts[key].values()) == len(infos)
        assert set(facts[key]) == {of(info) for info in infos.values()}
        assert sum(share["raw"] for share in facts[key].values()) == version.raw
    assert sum(share["stored"] for share in facts["codecs"].values()) == version.bytes
    assert sum(share["planes"] for share in facts["codecs"].values()) >= facts["chunks"]
    assert len(facts["largest"]) == 10
    assert facts["largest"][0]["name"] == "optimizer.exp_avg"
    assert facts["largest"][0]["shape"] == [600, 100]


def test_show_text_fits_80_columns(run_folder: Path) -> None:
    result = run("show", run_folder, "best")
    assert result.exit_code == 0
    for word in (
        "step     200",
        "loss inf",
        "best",
        "optimizer",
        "bfloat16",
        "zstd",
        "model.embed",
        "600 x 100",
        "4 plain values",
    ):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines()[1:])) <= 80


def test_show_escapes_control_characters_in_names(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path)) as local:
        local.save({"\x1b[31m[bold]evil[/bold]\n:skull:": torch.ones(3)}, step=1)
    shown = run("show", tmp_path).stdout
    assert "\x1b" not in shown
    assert "\\x1b[31m[bold]evil[/bold]\\n:skull:" in shown
    for stream in (output.out, output.err):
        with stream.capture() as captured:
            stream.print(":skull:")
        assert captured.get() == ":skull:\n"


# restore


def bits(value: Any) -> bytes:
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def flat(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, child in node.items():
        if isinstance(child, dict):
            yield from flat(child, f"{path}{key}.")
        else:
            yield path + key, child


def test_restored_files_open_with_safetensors_bit_for_bit(run_folder: Path, tmp_path: Path) -> None:
    facts = run_json("restore", run_folder, "--output", tmp_path / "new" / "out", "best")
    folder = Path(facts["directory"])
    assert sorted(path.name for path in folder.iterdir()) == ["optimizer.safetensors", "values.json", "weights.safetensors"]
    loaded = load_file(folder / "weights.safetensors") | load_file(folder / "optimizer.safetensors")
    saved = {name: value for name, value in flat(mixed_state(2)) if isinstance(value, torch.Tensor | np.ndarray)}
    assert set(loaded) == set(saved)
    for name, value in saved.items():
        assert bits(loaded[name]) == bits(value), name
        if name != "rotary":
            assert tuple(loaded[name].shape) == tuple(value.shape)
            assert str(loaded[name].dtype).removeprefix("torch.") == str(value.dtype).removeprefix("torch.")
    assert facts["mapped"] == {"rotary": {"dtype": "complex128", "stored_as": "F64", "shape": [3, 2, 2]}}
    assert torch.equal(torch.view_as_complex(loaded["rotary"]), mixed_state(2)["rotary"])


def test_values_json_has_plain_values_of_all_ranks(run_folder: Path, tmp_path: Path) -> None:
    run_json("restore", run_folder, "--output", tmp_path / "out")
    content = json.loads((tmp_path / "out" / "values.json").read_text())
    assert (content["version"], content["step"], content["metrics"]) == (3, 300, {"loss": 2.25})
    decoded = {name: values.decode(form) for name, form in content["values"].items()}
    assert np.isnan(decoded.pop("worst"))
    assert decoded == {"epoch": 3, "lr": 3e-4, "seen": b"\x00\xff"}
    assert content["by_rank"] == {"epoch": [{"ranks": [0], "value": 3}, {"ranks": [1], "value": 4}]}


def test_large_groups_are_split_and_indexed(run_folder: Path, tmp_path: Path, small_slabs: None) -> None:
    facts = run_json("restore", run_folder, "--output", tmp_path / "out", "--max-file-size", "64KiB")
    names = [file["name"] for file in facts["files"] if file["group"] == "weights"]
    assert names == [f"weights-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) > 1
    index = json.loads((tmp_path / "out" / "weights.safetensors.index.json").read_text())
    saved = dict(flat(mixed_state(3)))
    for name, file in index["weight_map"].items():
        assert bits(load_file(tmp_path / "out" / file)[name]) == bits(saved[name]), name
    assert index["metadata"]["total_size"] == sum(file["nbytes"] for file in facts["files"] if file["group"] == "weights")


def test_restore_refuses_a_folder_that_is_not_empty(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    result = run("restore", run_folder, "--output", tmp_path)
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_restore_accepts_an_empty_folder(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("restore", run_folder, "--output", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "values.json").exists()


@pytest.mark.parametrize(
    ("stop", "code"), [(KeyboardInterrupt(), 130), (Damaged("x", subject="y"), 3), (OSError(28, "full", "f"), 1)]
)
def test_a_failed_restore_leaves_no_files(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException, code: int
) -> None:
    def write_index_and_stop(write: object, name: str, content: object) -> None:
        assert len(list((tmp_path / "a").glob("*/*"))) == 2  # both tensor files are written
        raise stop

    monkeypatch.setattr(version_files, "write_json", write_index_and_stop)
    assert run("restore", run_folder, "--output", tmp_path / "a" / "out").exit_code == code
    assert list(tmp_path.iterdir()) == []


def test_an_uncreatable_output_folder_is_reported_with_a_remedy(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for to in (Path("/proc/x/y"), tmp_path / "file" / "x", tmp_path / "file" / "x" / "y"):
        error, remedy = run("restore", run_folder, "--output", to).stderr.splitlines()
        assert error.split(": ")[1] in map(str, (to, *to.parents))
        assert remedy.startswith("  try: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("words", [("restore", "--output"), ("export", "--torch")])
def test_a_loop_of_links_is_no_output_path(run_folder: Path, tmp_path: Path, words: tuple[str, str]) -> None:
    command, option = words
    (tmp_path / "loop").symlink_to("loop")
    assert run(command, run_folder, option, tmp_path / "loop" / "x").stderr.startswith(f"error: {tmp_path / 'loop'}: ")


def test_a_failed_write_names_the_output(run_folder: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        result = run("restore", run_folder, "--output", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (result.exit_code, result.stderr) == (1, f"error: {tmp_path / 'out'}: File too large\n")


def test_a_damaged_version_is_not_restored(own_folder: Path, tmp_path: Path) -> None:
    flip_byte(next(own_folder.glob("versions/00000002-*/optimizer-*.pack")))
    result = run("restore", own_folder, "--output", tmp_path / "out")
    assert (result.exit_code, "optimizer-" in result.stderr) == (3, True)
    assert not (tmp_path / "out").exists()
    assert run("restore", own_folder, "--output", tmp_path / "out", 1).exit_code == 0


@pytest.mark.parametrize(
    ("dtype", "shape", "form", "stored"),
    [
        ("complex32", (4,), "F16", (4, 2)),
        ("complex128", (), "F64", (2,)),
        ("float4_e2m1fn_x2", (3, 4), "F4", (3, 8)),
        ("int4", (5,), "U8", (5,)),
        ("bits16", (5,), "U16", (5,)),
        ("float8_e8m0fnu", (5,), "F8_E8M0", (5,)),
    ],
)
def test_dtypes_that_safetensors_lacks_are_mapped(dtype: str, shape: tuple[int, ...], form: str, stored: tuple[int, ...]) -> None:
    (file,) = safetensors_file.files({"a": TensorInfo(shape, dtype, 64, 64, "tensor", "weights")}, limit=1 << 30)
    placed = file.tensors[0]
    assert (placed.form, placed.shape) == (form, stored)
    dtypes = json.loads(file.header({})[8:])["__metadata__"].get("raystow.dtypes")
    assert dtypes == (json.dumps({"a": dtype}) if placed.mapped else None)
    assert placed.mapped == (dtype not in ("float8_e8m0fnu", "float4_e2m1fn_x2"))


# doctor


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent ``doctor`` from connecting to a Ray cluster on this machine."""
    survey_finds(monkeypatch, lambda: {"none": "no Ray cluster is running here: whatever Ray says"})


def survey_finds(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], dict[str, Any]]) -> None:
    """Replace the process that ``doctor`` starts to survey the cluster."""
    monkeypatch.setattr(software, "survey", answer)


def found(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in report["checks"]}


@pytest.mark.usefixtures("no_cluster")
def test_doctor_without_a_cluster_reports_no_failure() -> None:
    report = run_json("doctor")
    checks = found(report)
    assert report["ok"]
    assert {
        "python",
        "loops",
        "torch",
        "ray",
        "cluster",
        "bounds",
        "gpus",
        "shared memory",
        "/dev/shm",
        "cores",
        "memory",
    } <= set(checks)
    assert all(check["status"] in ("ok", "warning") for check in report["checks"])
    assert checks["cluster"]["found"] == "no Ray cluster is running here"
    assert "memfd" in checks["shared memory"]["found"]


def test_doctor_counts_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    survey_finds(monkeypatch, lambda: {"nodes": 3.0, "CPU": 24.0, "GPU": 2.0})
    assert found(run_json("doctor"))["cluster"]["found"] == "reachable: nodes 3, CPUs 24, GPUs 2"


def test_doctor_runs_no_module_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('run from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    assert "none" in software.survey()


def test_doctor_does_not_wait_for_a_dead_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # reserved for documentation (RFC 5737): no host answers
    finding = software.cluster()
    assert (finding.status.value, finding.found) == ("ok", "no Ray cluster is running here")


@pytest.mark.usefixtures("no_cluster")
def test_doctor_probes_a_folder_and_removes_its_files(tmp_path: Path, run_folder: Path) -> None:
    before = sorted(run_folder.rglob("*"))
    checks = found(run_json("doctor", run_folder))
    assert "3 versions, the newest of step 300" in checks["repository"]["found"]
    for name in ("store", "repository", "conditional writes", "latency", "clock", "throughput"):
        assert checks[name]["status"] in ("ok", "warning"), checks[name]
    assert sorted(run_folder.rglob("*")) == before

    checks = found(run_json("doctor", tmp_path / "not yet" / "there"))
    assert checks["repository"]["found"].startswith("none yet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_cluster")
def test_doctor_accepts_a_memory_store() -> None:
    repository = memory_repository()
    result = run("doctor", repository.uri)
    assert result.exit_code == 0, result.output
    assert "conditional writes" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert [info.key for info in repository.store.list("")] == ["raystow.json", "root.json"]


@pytest.mark.s3
@pytest.mark.usefixtures("no_cluster")
def test_doctor_accepts_an_s3_store(s3_uri: str) -> None:
    repository = create_repository(s3_uri)
    checks = found(run_json("doctor", s3_uri))
    assert checks["conditional writes"]["status"] == "ok"
    assert checks["throughput"]["status"] in ("ok", "warning")
    assert [info.key for info in repository.store.list("")] == ["raystow.json", "root.json"]


@pytest.mark.usefixtures("no_cluster")
def test_doctor_fails_on_a_store_without_conditional_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(*_: object) -> None:
        raise UnsafeStore("two writers both created one object", remedy="use another")

    monkeypatch.setattr("raystow.cli.checks.store.probe_conditional_writes", probe)
    report = run_json("doctor", tmp_path, code=5)
    assert (report["ok"], found(report)["conditional writes"]["follows"]) == (False, "use another")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_doctor_reports_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert found(run_json("doctor", tmp_path / "x", code=1))["writing"]["status"] == "failed"


@pytest.mark.usefixtures("no_cluster")
def test_an_exception_in_a_check_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def survey() -> dict[str, Any]:
        raise ValueError("surprise")

    survey_finds(monkeypatch, survey)
    report = run_json("doctor", code=1)
    assert found(report)["cluster"]["found"] == "ValueError: surprise"
    assert report["checks"][-1]["name"] == "memory"  # the other checks ran


def test_doctor_uses_the_limits_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system_calls: SystemCalls
) -> None:
    for name, text in {"memory.max": f"{3 << 30}\n", "memory.current": f"{5 << 29}\n", "cpu.max": "150000 100000\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "control_groups", lambda controller: iter([tmp_path]))
    system_calls.replace(sched_getaffinity=lambda pid: range(8))
    memory, cores, shared = hardware.memory(), hardware.cores(), hardware.shared_memory()
    assert (memory.status.value, memory.found) == ("warning", "512 MiB available of 3.00 GiB (the container's limit)")
    assert (cores.status.value, cores.found) == ("warning", "8 cores, limited by a quota to 1.5")
    assert shared.status.value == "warning"
    assert "512 MiB" in shared.found


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:10:21 UTC 2025\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@x)\nGCC version: 13.3.0\n",
    ],
)
def test_doctor_warns_about_a_driver_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = hardware.gpus(tmp_path / "version")
    assert finding.status.value == "warning"
    assert finding.found.startswith("NVIDIA driver 580.65.06")


# errors


def test_a_folder_without_a_repository_is_reported(tmp_path: Path) -> None:
    result = run("ls", tmp_path)
    assert result.exit_code == 4
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"error: {tmp_path.as_uri()}: there is no repository here",
        "  try: check the path; the first save makes one",
    ]
    error = run_json("ls", tmp_path, code=4)["error"]
    assert error == {
        "kind": "NotARepository",
        "what": "there is no repository here",
        "subject": tmp_path.as_uri(),
        "remedy": "check the path; the first save makes one",
    }


def test_a_missing_version_is_not_found(run_folder: Path) -> None:
    for words in (("show", run_folder, 9), ("verify", run_folder, "worst"), ("restore", run_folder, "--output", "x", 9)):
        assert run(*words).exit_code == 4
        assert run_json(*words, code=4)["error"]["kind"] == "NotFound"


def test_a_damaged_root_is_reported(own_folder: Path) -> None:
    flip_byte(own_folder / "root.json")
    result = run("ls", own_folder)
    assert result.exit_code == 3
    assert "root.json" in result.stderr


def test_invalid_arguments_are_usage_errors(run_folder: Path) -> None:
    assert run("list").exit_code == 2
    assert run("restore", run_folder).exit_code == 2
    assert run("verify", run_folder, 1, "--all").exit_code == 2
    for address in ("gopher://x", "gs://b/x", "s3://", ""):
        assert run_json("ls", address, code=2)["error"]["kind"] == "StateError"


@pytest.mark.parametrize("command", ["ls", "show", "verify", "restore", "doctor"])
def test_help_has_an_example_and_fits_80_columns(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example:  raystow {command} s3://" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
