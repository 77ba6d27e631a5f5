"""One rank of ``gpu_megatron.py``: trains a GPT of Megatron-Core, and is killed, resumed or measured.

A run records a digest of each thing that must be equal to that of another run, by step: losses, gradients, weights, optimizer
state, random generators. The first that differs names the cause.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import report
import torch
import torch.distributed as dist
from integration.megatron_ranks import Layout, Training, inner_optimizers, whole

SEED, STEPS, AT = 7, 6, 3
"""Steps of an undisturbed run, and the step that is saved."""
UNCACHED = "raystow, no version in memory"
_GROUP = "lr", "betas", "eps", "weight_decay"


def rank_main(task: str, about: dict[str, Any]) -> None:
    """Run a task on this rank, and write its result."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(task == "train")
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    if about.get("uri"):
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    training = Training(Layout(**about["layout"]), about.get("seed", SEED))
    found = TASKS[task](training, about)
    Path(about["result"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    report.leave()


class Trace:
    """Digests of this rank's run, by step and name."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.digests: dict[str, str] = {}

    def gradients(self) -> None:
        """Record the gradients, before the optimizer's step."""
        for name, parameter in self._parameters():
            self._record(f"gradient of {name}", parameter.main_grad)

    def state(self) -> None:
        """Record the state after a step."""
        training = self._training
        for name, parameter in self._parameters():
            self._record(f"weights {name}", parameter)
        for inner in inner_optimizers(training.optimizer):
            parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
            for number, parameter in enumerate(parameters):
                self._record(f"fp32 weights {number}", parameter)
                for name, tensor in inner.state[parameter].items():
                    self._record(f"{name} {number}", torch.as_tensor(tensor, dtype=torch.float32))
            self._note("groups", json.dumps([[group[name] for name in _GROUP] for group in inner.param_groups]))
        generators = training.random_generators()
        for name, state in {**generators, **generators["tracker"]}.items():
            if isinstance(state, torch.Tensor):
                self._record(f"generator {name}", state)

    def losses(self, losses: list[str]) -> None:
        """Record the losses of the step that has just ended."""
        self._note("losses", " ".join(losses))

    def _parameters(self) -> list[tuple[str, Any]]:
        return [named for chunk in self._training.model for named in chunk.named_parameters()]

    def _record(self, name: str, tensor: torch.Tensor) -> None:
        self._note(name, f"{digest(tensor.detach()):016x}")

    def _note(self, name: str, value: str) -> None:
        self.digests[f"step {self._training.step_number}: {name}"] = value


def digest(tensor: torch.Tensor) -> int:
    """Return a sum of the elements' bits, each multiplied by a number of its own, modulo 2**64; on the device of the tensor."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    raw = tensor.contiguous().flatten().view(integers[tensor.element_size()]).long()
    factors = torch.arange(1, len(raw) + 1, device=raw.device) * 0x1E3779B97F4A7C15 | 1
    return int((raw * factors).sum()) % 2**64


def train(training: Training, about: dict[str, Any]) -> dict[str, Any]:
    """Train, save at step ``AT`` while training goes on, and perhaps die; or load first. Without a repository only train."""
    import raystow
    import raystow.megatron

    trace = Trace(training)
    if not about.get("uri"):
        return {"trace": trained(training, trace, STEPS), "state": {}}
    checkpointer = raystow.Checkpointer(about["uri"])
    if about.get("load"):
        loaded = raystow.megatron.load(checkpointer, training.state(is_loading=True, rng=about["load"] == "same"))
        assert loaded is not None
        training.take(loaded)
        state = gathered(training)
        if about["load"] == "same":
            trace.state()
            trained(training, trace, STEPS, checkpointer.fence)
        checkpointer.close()
        return {"trace": trace.digests, "state": state}
    trained(training, trace, AT, checkpointer.fence)
    state = gathered(training)
    pending = raystow.megatron.save(checkpointer, training.state(), step=AT)
    trained(training, trace, AT + 1 if about.get("kill") else STEPS, checkpointer.fence)
    if about.get("kill"):
        pending.result()
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    return {"trace": trace.digests, "state": state}


def trained(training: Training, trace: Trace, until: int, fence: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Train until a step is done, and return the trace."""

    def before() -> None:
        trace.gradients()
        fence()

    while training.step_number < until:
        losses = training.train(1, before=before)
        trace.losses(losses)
        trace.state()
    return trace.digests


def gathered(training: Training) -> dict[str, str]:
    """Digests of the whole tensors, which do not depend on the layout."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, training.parts())
    return whole(every)


def measure(training: Training, about: dict[str, Any]) -> dict[str, Any]:
    """Time steps, saves and loads. Seconds; bytes of this rank's peak of resident memory over that before."""
    training.train(3)
    step = min(timed(lambda: training.train(1)) for _ in range(5))
    tensors = [
        tensor
        for inner in inner_optimizers(training.optimizer)
        for parameter, state in inner.state.items()
        for tensor in (parameter, *state.values())
        if isinstance(tensor, torch.Tensor)
    ]
    weights = [parameter for chunk in training.model for parameter in chunk.parameters()]
    found: dict[str, Any] = {"step": step, "shard": sum(tensor.nbytes for tensor in [*tensors, *weights])}
    for name in about["contestants"]:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the current size
        before = report.peak_memory()
        found[name] = CONTESTANTS[name](training, about, step)
        found[name] |= {key: found[name][key] - before for key in ("peak", "peak with loads")}
        if dist.get_rank() == 0:
            print(name, json.dumps(found[name]), flush=True)
    return found


def of_raystow(training: Training, about: dict[str, Any], step: float, *, cache: int | None = None) -> dict[str, Any]:
    """Figures of ``raystow.megatron``. ``cache``: see ``raystow.Memory``."""
    import raystow
    import raystow.megatron

    uri = f"{about['uri']}-{cache}"
    with raystow.Checkpointer(uri, memory=raystow.Memory(cache=cache)) as checkpointer:
        lost, durable = [], []
        for _ in range(4):
            start, saves = time.perf_counter(), list[raystow.Pending]()

            def save_and_train(saves: list[raystow.Pending] = saves) -> None:
                saves.append(raystow.megatron.save(checkpointer, training.state(), step=training.step_number))
                training.train(1, before=checkpointer.fence)

            lost.append(timed(save_and_train) - step)
            saves[0].result()
            durable.append(time.perf_counter() - start)

        def load() -> None:
            training.take(raystow.megatron.load(checkpointer, training.state(is_loading=True)))  # type: ignore[arg-type]

        found: dict[str, Any] = {"lost": lost, "durable": durable, "peak": report.peak_memory()}
        found["load"] = [timed(load) for _ in range(2)]
        version = raystow.latest(uri)
        assert version is not None
        return found | {"stored": version.bytes, "peak with loads": report.peak_memory()}


def of_megatron(
    training: Training, about: dict[str, Any], step: float, *, sharding: str, asynchronous: str = ""
) -> dict[str, Any]:
    """Figures of Megatron's ``torch_dist``. ``asynchronous``: whose saves in a process of their own, "mcore" or "nvrx"."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    folder = Path(about["folder"]) / f"{sharding}-{asynchronous}"
    _, modules = get_async_strategy(asynchronous or "mcore")
    metadata, queue = {"distrib_optim_sharding_type": sharding}, modules["AsyncCallsQueue"](persistent=asynchronous == "nvrx")
    lost, durable = [], []
    for _ in range(2):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        dist.barrier()
        start = time.perf_counter()

        def save_and_train() -> None:
            state = training.state(metadata=metadata)
            request = dist_checkpointing.save(
                state,
                str(folder),
                async_sharded_save=bool(asynchronous),
                async_strategy=asynchronous or "mcore",
                validate_access_integrity=False,
            )
            if asynchronous:
                queue.schedule_async_request(request)
            else:
                durable.append(time.perf_counter() - start)  # noqa: B023
            training.train(1)

        lost.append(timed(save_and_train) - step)
        if asynchronous:
            queue.maybe_finalize_async_calls(blocking=True)
            durable.append(time.perf_counter() - start)
    queue.close()
    found: dict[str, Any] = {"lost": lost, "durable": durable, "peak": report.peak_memory()}
    found["stored"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def load() -> None:
        state = training.state(is_loading=True, metadata=metadata)
        training.take(dist_checkpointing.load(state, str(folder)))

    try:
        found["load"] = [timed(load) for _ in range(2)]
    except (KeyError, AssertionError) as error:
        found["load"] = repr(error)
    return found | {"peak with loads": report.peak_memory()}


def timed(what: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks make."""
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    what()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


CONTESTANTS: dict[str, Callable[[Training, dict[str, Any], float], dict[str, Any]]] = {
    "raystow": of_raystow,
    UNCACHED: functools.partial(of_raystow, cache=0),
    "torch_dist, dp_reshardable": functools.partial(of_megatron, sharding="dp_reshardable"),
    "torch_dist, fully_reshardable": functools.partial(of_megatron, sharding="fully_reshardable"),
    "torch_dist, dp_reshardable, asynchronous": functools.partial(of_megatron, sharding="dp_reshardable", asynchronous="mcore"),
}
if importlib.util.find_spec("nvidia_resiliency_ext") is not None:
    CONTESTANTS["torch_dist, dp_reshardable, NVRx"] = functools.partial(
        of_megatron, sharding="dp_reshardable", asynchronous="nvrx"
    )
TASKS = {"train": train, "measure": measure}
