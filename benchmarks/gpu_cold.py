"""Measure the first restore and the first save of a process on one GPU: each case in a new process, in turn.

*State.* Synthetic, mixed precision: bf16 weights, fp32 master copy, two moments, 14 bytes per parameter, 4.4 GB by default. It is
saved once to /dev/shm by each contestant; raystow's version is also in the memory of the node worker.

*Method.* Each measurement is a new process with a new HOME, TRITON_CACHE_DIR and CUDA_CACHE_PATH. It imports torch, creates the
tensors on the GPU, imports what the case needs (``import``), and connects (``start``); then the clock of ``restore``, or of
``save`` and ``fence``, runs until the GPU is idle. After a restore every tensor is compared with the original. ``prepared`` cases
restore into the state and then train for ten seconds before the save. Cases take turns in every round; a cell is the median.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

CODEC = "auto"
STORE, MEMORY = "raystow, from the store", "raystow, from the node's memory"
PEERS = ("torch.save", "DCP async pinned", "torch_checkpointing")
RESTORES = (STORE, MEMORY, *PEERS)
SAVES = ("raystow, nothing before", "raystow, prepared", "DCP async pinned", "torch_checkpointing")
_LAYERS = 24
_PATIENCE = 60.0  # seconds for one process
_TRAINING = 10.0  # seconds between restore and save


def state(gigabytes: float, *, seed: int | None) -> dict[str, dict[str, Any]]:
    """Return the state on the GPU, drawn with ``seed``; zeros with None."""
    import torch

    rows = int(gigabytes * 1e9 / 14 / _LAYERS / 2048)
    groups: dict[str, dict[str, Any]] = {name: {} for name in ("weights", "master", "exp_avg", "exp_avg_sq")}
    draw = torch.Generator("cuda").manual_seed(seed or 0)
    for layer in range(_LAYERS):
        for group, scale in (("master", 0.02), ("exp_avg", 1e-4), ("exp_avg_sq", 1e-4)):
            made = torch.zeros(rows, 2048, device="cuda")
            if seed is not None:
                made.normal_(0, scale, generator=draw)
            groups[group][f"layers.{layer}"] = made.square_() if group == "exp_avg_sq" else made
        groups["weights"][f"layers.{layer}"] = groups["master"][f"layers.{layer}"].bfloat16()
    return groups


def contestant(name: str, root: Path) -> Any:
    """Return a contestant of ``gpu_contestants``."""
    from gpu_contestants import field, ours

    made: Any = field(root, (CODEC,), None)[ours(CODEC) if name.startswith("raystow") else name]()
    if name in PEERS:
        made._path = made._root / "1"
    return made


def connect() -> None:
    """Connect to the cluster that the parent has started."""
    import ray

    ray.init(log_to_driver=False, logging_level="error")


def restore(case: str, root: Path, gigabytes: float) -> dict[str, float]:
    """Restore once in this process; return the seconds of each part."""
    import torch

    into = state(gigabytes, seed=None)
    torch.cuda.synchronize()
    if case == MEMORY:
        connect()
    parts = {"begin": time.perf_counter()}
    run = prepared_restore(case, root, into, parts)
    parts["start"] = time.perf_counter()
    run()
    torch.cuda.synchronize()
    parts["restore"] = time.perf_counter()
    original = state(gigabytes, seed=0)
    for group, tensors in original.items():
        for name, tensor in tensors.items():
            if not torch.equal(tensor.view(torch.int16), into[group][name].view(torch.int16)):
                raise SystemExit(f"{case} did not restore {group}.{name}")
    return seconds(parts)


def prepared_restore(case: str, root: Path, into: Any, parts: dict[str, float]) -> Callable[[], object]:
    """Import and connect; return the call that is measured."""
    if case == STORE:
        import raystow

        _ = raystow.Checkpointer  # names are imported at first use
        parts["import"] = time.perf_counter()
        return lambda: raystow.restore_latest(root / f"raystow-{CODEC}", into=into)
    if case == MEMORY:
        import raystow

        _ = raystow.Checkpointer  # names are imported at first use
        parts["import"] = time.perf_counter()
        made = contestant(case, root)
        return lambda: made.checkpointer.restore_latest(into=into)
    made = contestant(case, root)
    parts["import"] = time.perf_counter()
    return lambda: made.load(into)


def save(case: str, root: Path, gigabytes: float) -> dict[str, float]:
    """Save once in this process; return the seconds of each part."""
    import torch

    of = state(gigabytes, seed=0)
    torch.cuda.synchronize()
    own = Path(tempfile.mkdtemp(dir=root))
    try:
        if case.startswith("raystow"):
            connect()
        parts = {"begin": time.perf_counter()}
        import raystow

        _ = raystow.Checkpointer  # names are imported at first use
        parts["import"] = time.perf_counter()
        made = contestant(case, own)
        parts["start"] = time.perf_counter()
        if case == SAVES[1]:
            made.checkpointer.restore_latest(into=of)
            train(_TRAINING)
        parts["wait"] = time.perf_counter()
        durable = made.save(of, 1)
        parts["save"] = time.perf_counter()
        made.fence()
        parts["fence"] = time.perf_counter()
        durable()
        parts["durable"] = time.perf_counter()
        found = seconds(parts)
        made.close()
        return {**found, "hold": found["save"] + found["fence"]}
    finally:
        shutil.rmtree(own, ignore_errors=True)


def train(least: float) -> None:
    """Keep the GPU busy for some seconds."""
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + least
    while time.perf_counter() < end:
        a = (a @ a).clamp_(-1, 1)
        torch.cuda.synchronize()


def seconds(parts: dict[str, float]) -> dict[str, float]:
    """Return how long each part has taken."""
    names = list(parts)
    return {name: parts[name] - parts[before] for before, name in itertools.pairwise(names)}


def child(what: str, case: str, root: Path, gigabytes: float) -> dict[str, float] | str:
    """Run one case in a new process without any cache; return its seconds, or why it failed."""
    with tempfile.TemporaryDirectory() as home:
        caches = {"HOME": home, "TRITON_CACHE_DIR": f"{home}/triton", "CUDA_CACHE_PATH": f"{home}/cuda"}
        command = [sys.executable, __file__, "--what", what, "--case", case, "--root", str(root), "--gigabytes", str(gigabytes)]
        try:
            done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            return f"did not end within {_PATIENCE:.0f} s"
    if done.returncode:
        return (done.stderr.strip() or done.stdout.strip()).splitlines()[-1][:300]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(what: str, cases: tuple[str, ...], root: Path, gigabytes: float, rounds: int) -> dict[str, Any]:
    """Run every case in each round; return medians and all figures."""
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for case in cases:
            one = failed[case] if case in failed else child(what, case, root, gigabytes)
            print(what, case, one, flush=True)
            if isinstance(one, str):
                failed[case] = one
            else:
                found[case].append(one)
    return {
        case: {**{key: statistics.median(one[key] for one in output) for key in output[0]}, "all": output}
        if (output := found[case])
        else {"skipped": failed[case]}
        for case in cases
    }


def claims(restores: dict[str, Any], saves: dict[str, Any]) -> dict[str, bool | None]:
    """Return the goals and whether this run meets them; None: not measured."""

    def at_most(rows: dict[str, Any], case: str, key: str, limit: float | None) -> bool | None:
        value = rows.get(case, {}).get(key)
        return None if value is None or limit is None else value <= limit

    torch_load = restores.get("torch.save", {}).get("restore")
    return {
        "first restore from the store: 0.8 s": at_most(restores, STORE, "restore", 0.8),
        "first restore from memory: 0.8 s": at_most(restores, MEMORY, "restore", 0.8),
        "from the store: 0.4 times torch.load": at_most(restores, STORE, "restore", torch_load and 0.4 * torch_load),
        "first save holds the loop 0.25 s after preparation": at_most(saves, SAVES[1], "hold", 0.25),
        "first save holds the loop 1.5 s without": at_most(saves, SAVES[0], "hold", 1.5),
        "import of raystow, with Ray and torch loaded: 0.3 s": at_most(restores, MEMORY, "import", 0.3),
        "Checkpointer() returns in 0.5 s": at_most(restores, MEMORY, "start", 0.5),
    }


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted at the end")] = Path("/dev/shm"),
    rounds: Annotated[int, typer.Option(min=1, help="processes for each case")] = 5,
    gigabytes: Annotated[float, typer.Option(help="size of the state")] = 4.4,
    case: Annotated[list[str] | None, typer.Option(help="case to measure (repeatable); default: all")] = None,
    what: Annotated[str, typer.Option(hidden=True)] = "",
    root: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the first restore and the first save of a process."""
    if what and case and root is not None:
        print(json.dumps({"restore": restore, "save": save, "keep": keep}[what](case[0], root, gigabytes)))
        return
    import ray
    import report
    from gpu_contestants import start_ray
    from gpu_save import console_for_tables
    from gpu_workload import about, device_named

    wanted = report.chosen(case, dict.fromkeys([*RESTORES, *SAVES]))
    console, start = console_for_tables(), device_named("cuda")
    results: dict[str, Any] = {**about(start), "settings": {"rounds": rounds, "gigabytes": gigabytes}}
    os.environ["RAY_AUTH_MODE"] = "disabled"  # the token is in HOME, which is a new one for each process
    start_ray()
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # for the processes that are measured
    with tempfile.TemporaryDirectory(prefix="raystow-gpu-cold-", dir=store) as folder:
        place = Path(folder)
        for name in (MEMORY, *PEERS):
            if name in wanted or (name == MEMORY and STORE in wanted):
                output = child("keep", name, place, gigabytes)
                if isinstance(output, str):
                    console.print(f"{name} could not save: {output}", markup=False)
        restores = measure("restore", tuple(c for c in RESTORES if c in wanted), place, gigabytes, rounds)
        saves = measure("save", tuple(c for c in SAVES if c in wanted), place, gigabytes, rounds)
    results |= {"restores": restores, "saves": saves, "claims": claims(restores, saves)}
    grids = []
    for title, rows, keys in (
        (f"first restore of a process, {gigabytes} GB: seconds", restores, ("import", "start", "restore")),
        (f"first save of a process, {gigabytes} GB: seconds", saves, ("import", "start", "save", "fence", "hold", "durable")),
    ):
        grid = report.table_of(title, *keys)
        for name, row in rows.items():
            grid.add_row(name, *([row["skipped"]] if "skipped" in row else [f"{row[key]:.3f}" for key in keys]))
        grids.append(grid)
    report.show(console, grids, results["claims"])
    report.write(console, out, "gpu_cold", results)
    report.leave()


def keep(case: str, root: Path, gigabytes: float) -> dict[str, float]:
    """Save the state for later processes."""
    if case == MEMORY:
        connect()
    made = contestant(case, root)
    of = state(gigabytes, seed=0)
    made.save(of, 1)()
    made.close()
    return {}


if __name__ == "__main__":
    typer.run(main)
