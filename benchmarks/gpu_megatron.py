"""Measure Megatron-Core on two GPUs of one host: what a save costs the training, and what Megatron's own checkpoints cost.

Two ranks train a GPT with ``DistributedOptimizer``, once with tensor and once with data parallelism. First they prove that a run
whose ranks are killed resumes in the bits of an undisturbed one, and that the other layout restores the same state. Then saves
and loads are timed: raystow's, and Megatron's ``torch_dist`` in both formats of the optimizer. ``--cpu`` needs no GPUs.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import typer

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))  # the training is that of the tests

SEED, STEPS, AT = 7, 6, 3
"""Steps of an undisturbed run, and the step that is saved."""


def launch(task: str, layout: dict[str, int], folder: Path, **options: Any) -> list[Any]:
    """Run a task of this script on two ranks, and return their results; none of a task that kills its ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    running, results = [], [folder / f"{task}-{rank}.json" for rank in range(2)]
    for rank, result in enumerate(results):
        result.unlink(missing_ok=True)
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0"}
        environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
        about = json.dumps({"layout": layout, "folder": str(folder), "result": str(result), **options})
        command = [sys.executable, "-W", "ignore", __file__, "--task", task, "--about", about]
        running.append(subprocess.Popen(command, env={**os.environ, **environment}))
    codes = [process.wait() for process in running]
    if options.get("kill"):
        assert codes == [-signal.SIGKILL] * 2, codes
        return []
    assert codes == [0, 0], f"{task} {layout}: {codes}"
    return [json.loads(result.read_text()) for result in results]


def rank_main(task: str, about: dict[str, Any]) -> None:
    """One rank of a task."""
    import torch.distributed as dist
    from integration.megatron_ranks import Layout, Training

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    training = Training(Layout(**about["layout"]), SEED if about.get("seeded", True) else SEED + 1)
    found = TASKS[task](training, about)
    Path(about["result"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train(training: Any, about: dict[str, Any]) -> Any:
    """Train, save at step ``AT`` while training goes on, and perhaps die; or load first. Returns losses and digests."""
    import torch.distributed as dist
    from integration.megatron_ranks import whole

    import raystow
    import raystow.megatron

    checkpointer = raystow.Checkpointer(about["uri"])
    losses: list[str] = []
    digests: dict[str, str] = {}

    def state() -> dict[str, str]:
        every: list[Any] = [None, None]
        dist.all_gather_object(every, training.parts())
        return whole(every)

    if about.get("load"):
        same = about["load"] == "same"
        loaded = raystow.megatron.load(checkpointer, training.state(is_loading=True, rng=same))
        training.take(loaded)
        digests = state()
    while training.step_number < STEPS and about.get("load") != "other":
        losses += training.train(1, before=checkpointer.fence)
        if training.step_number == AT and not about.get("load"):
            digests = state()
            pending = raystow.megatron.save(checkpointer, training.state(), step=AT)
            if about.get("kill"):
                losses += training.train(1, before=checkpointer.fence)
                pending.result()
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    return {"losses": losses, "digests": digests}


def measure(training: Any, about: dict[str, Any]) -> Any:
    """Time steps, saves and loads. Seconds; bytes of this rank's peak of host memory over that before."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    import raystow
    import raystow.megatron

    def timed(what: Any) -> float:
        dist.barrier()
        _synchronize()
        start = time.perf_counter()
        what()
        _synchronize()
        return time.perf_counter() - start

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    training.train(3)
    found: dict[str, Any] = {"step": min(timed(lambda: training.train(1)) for _ in range(5))}
    found["shard"] = sum(
        tensor.nbytes
        for inner in _inner(training.optimizer)
        for p, state in inner.state.items()
        for tensor in (p, *state.values())
        if isinstance(tensor, torch.Tensor)
    )
    before = peak()
    with raystow.Checkpointer(about["uri"]) as checkpointer:
        times: list[tuple[float, float]] = []
        for _ in range(5):
            start, saves = time.perf_counter(), list[raystow.Pending]()

            def step(saves: list[raystow.Pending] = saves) -> None:
                saves.append(raystow.megatron.save(checkpointer, training.state(), step=training.step_number))
                training.train(1, before=checkpointer.fence)

            lost = timed(step) - found["step"]
            saves[0].result()
            times.append((lost, time.perf_counter() - start))
        found["raystow"] = {"first": times[0], "lost, durable": times[1:], "peak": peak() - before}

        def load() -> None:
            training.take(raystow.megatron.load(checkpointer, training.state(is_loading=True)))

        found["raystow"]["load"] = [timed(load) for _ in range(2)]
    for sharding in "dp_reshardable", "fully_reshardable":
        before, took = peak(), list[float]()
        for number in range(2):
            folder = Path(about["folder"]) / f"{sharding}-{number}"
            folder.mkdir(exist_ok=True)
            dist.barrier()
            metadata = {"distrib_optim_sharding_type": sharding}

            def save() -> None:
                dist_checkpointing.save(training.state(metadata=metadata), str(folder))  # noqa: B023

            took.append(timed(save))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found[sharding] = {"save": took, "peak": peak() - before, "stored": size}
        try:

            def load_own() -> None:
                state = training.state(is_loading=True, metadata=metadata)  # noqa: B023
                training.take(dist_checkpointing.load(state, str(folder)))  # noqa: B023

            found[sharding]["load"] = [timed(load_own) for _ in range(2)]
        except (KeyError, AssertionError) as error:
            found[sharding]["load"] = repr(error)
    return found


TASKS = {"train": train, "measure": measure}


def _inner(optimizer: Any) -> list[Any]:
    from integration.megatron_ranks import inner_optimizers

    return inner_optimizers(optimizer)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prove(name: str, layout: dict[str, int], other: dict[str, int], folder: Path) -> None:
    """Assert what the script promises about bits."""
    undisturbed = launch("train", layout, folder, uri=str(folder / f"{name}-whole"))
    uri = str(folder / name)
    launch("train", layout, folder, uri=uri, kill=True)
    resumed = launch("train", layout, folder, uri=uri, load="same", seeded=False)
    moved = launch("train", other, folder, uri=uri, load="other", seeded=False)
    losses = len(undisturbed[0]["losses"]) // STEPS * AT
    assert [one["losses"] for one in resumed] == [one["losses"][losses:] for one in undisturbed], (resumed, undisturbed)
    assert resumed[0]["digests"] == undisturbed[0]["digests"]
    assert moved[0]["digests"] == undisturbed[0]["digests"]
    print(f"{name}: killed and resumed, {len(resumed[0]['losses'])} losses equal bit for bit; {len(moved[0]['digests'])} tensors")


def main(
    layers: Annotated[int, typer.Option(help="Layers of the measured model.")] = 8,
    hidden: Annotated[int, typer.Option(help="Its width.")] = 2048,
    cpu: Annotated[bool, typer.Option(help="Try the script on a CPU, with a small model.")] = False,
    task: Annotated[str, typer.Option(hidden=True)] = "",
    about: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Prove that runs resume, and print figures as JSON."""
    if task:
        rank_main(task, json.loads(about))
        return
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    size = {"layers": 4, "hidden": 64} if cpu else {"layers": layers, "hidden": hidden, "length": 512, "vocabulary": 32_768}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        small = size if cpu else {**size, "layers": 2, "hidden": 1024, "vocabulary": 8192}
        prove("TP2", {"tp": 2, **small}, {"dp": 2, **small}, folder)
        prove("DP2", {"dp": 2, **small}, {"tp": 2, **small}, folder)
        for name, layout in {"TP2": {"tp": 2}, "DP2": {"dp": 2}}.items():
            uri = str(folder / f"measured-{name}")
            found = launch("measure", {**layout, **size}, folder, uri=uri)
            import raystow

            version = raystow.latest(uri)
            assert version is not None
            stored = {"raw": version.raw, "stored": version.bytes}
            print(json.dumps({"layout": name, **stored, "ranks": found}, indent=1))


if __name__ == "__main__":
    typer.run(main)
