"""The training function of ``gpu_recovery.py``, and its callback in Ray Train's controller; both append to one file of notes.

Each saver is used as its documentation shows. Libraries are imported in the function, because their imports are part of the
measured recovery, except torch, which Ray Train imports before it calls the function.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ray.train.v2._internal.execution.callback import WorkerGroupCallback

RAYSTOW, STORE, TORCH_SAVE, DCP = "raystow", "raystow, from the store", "torch.save", "DCP"
LIBRARIES = {RAYSTOW: "raystow", STORE: "raystow", TORCH_SAVE: "torch", DCP: "torch.distributed.checkpoint"}
STEPS = 5  # before the save, and after it before the worker may be killed
_LONGEST = 60.0  # seconds that the function waits for its kill

State = dict[str, dict[str, Any]]


class Notes:
    """The events of all processes of a run, as lines of JSON in one file of its folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "notes.jsonl"

    def add(self, event: str, **more: object) -> None:
        """Append an event with the time."""
        line = {"at": time.time(), "event": event, **more}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return all events, oldest first."""
        if not self._file.exists():
            return []
        lines = self._file.read_text().splitlines(keepends=True)
        return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda note: float(note["at"]))


class NotePolls(WorkerGroupCallback):  # type: ignore[misc]
    """A callback that notes each poll of the controller, and whether the poll found an error of a worker."""

    def __init__(self, folder: Path) -> None:
        self._notes = Notes(folder)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Called by the controller."""
        self._notes.add("detected" if worker_group_status.errors else "polled")


class BytesRead(logging.Handler):
    """A log handler that collects the bytes read by raystow's restore, by source."""

    def __init__(self) -> None:
        super().__init__()
        self.by_source: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger."""
        self.by_source.update(getattr(record, "bytes_read", {}))


class Saver(Protocol):
    """One library."""

    def restore(self, state: State) -> bool:
        """Fill the state from the newest checkpoint; return whether there is one."""

    def save(self, state: State, step: int) -> None:
        """Save the state; return when it is durable."""

    def close(self) -> None:
        """Stop the processes and threads of the library."""


class Raystow:
    """raystow, in the folder of the run. ``options``: those of the ``Checkpointer``."""

    def __init__(self, optimizer: Any, options: Mapping[str, Any]) -> None:
        import raystow

        self._checkpointer = raystow.ray_train.Checkpointer(**options)
        self._checkpointer.guard(optimizer)

    def restore(self, state: State) -> bool:
        """See ``Saver``."""
        return self._checkpointer.restore_latest(into=state) is not None

    def save(self, state: State, step: int) -> None:
        """See ``Saver``."""
        self._checkpointer.save(state, step=step).result()

    def close(self) -> None:
        """See ``Saver``."""
        self._checkpointer.close()


class TorchSave:
    """``torch.save`` to a file, and ``torch.load`` to the state's device."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.pt"

    def restore(self, state: State) -> bool:
        """See ``Saver``."""
        import torch

        if not self._file.exists():
            return False
        device = next(iter(next(iter(state.values())).values())).device
        found = torch.load(self._file, map_location=device, weights_only=True)
        for group, tensors in state.items():
            for name, tensor in tensors.items():
                tensor.copy_(found[group][name])
        return True

    def save(self, state: State, step: int) -> None:
        """See ``Saver``."""
        import torch

        written = self._file.with_suffix(".new")
        torch.save(state, written)
        written.replace(self._file)

    def close(self) -> None:
        """See ``Saver``."""


class Dcp:
    """``torch.distributed.checkpoint`` with the process group that Ray Train has made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "dcp"

    def restore(self, state: State) -> bool:
        """See ``Saver``."""
        import torch.distributed.checkpoint as dcp

        if not (self._folder / ".metadata").exists():
            return False
        dcp.load(state, checkpoint_id=str(self._folder))
        return True

    def save(self, state: State, step: int) -> None:
        """See ``Saver``."""
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=str(self._folder))

    def close(self) -> None:
        """See ``Saver``."""


def saver(name: str, folder: Path, optimizer: Any) -> Saver:
    """Return the saver with this name."""
    if name == RAYSTOW:
        return Raystow(optimizer, {})
    if name == STORE:
        import raystow

        return Raystow(optimizer, {"memory": raystow.Memory(cache=0)})
    makers: dict[str, Callable[[Path], Saver]] = {TORCH_SAVE: TorchSave, DCP: Dcp}
    return makers[name](folder)


def digest(state: State) -> list[int]:
    """Return a checksum of the bits of each tensor, weighted by place, made on the tensor's device."""
    import torch

    tensors = [tensor.reshape(-1).view(torch.int16) for group in state.values() for tensor in group.values()]
    places = torch.arange(1, 1 + max(len(bits) for bits in tensors), device=tensors[0].device)
    return [int((bits * places[: len(bits)]).sum().item()) for bits in tensors]


def train(config: dict[str, Any]) -> None:
    """Train and save once, then train until the process is killed; after the restart restore and train one step.

    ``folder``: of the run. ``saver``: its name. ``device``, and the fields of ``Size`` in ``size``.
    """
    folder = Path(config["folder"])
    notes = Notes(folder)
    log, read = logging.getLogger("raystow.orchestrator.restore.agreement"), BytesRead()
    log.setLevel(logging.INFO)
    log.addHandler(read)
    notes.add("function begins", pid=os.getpid())
    import torch
    from gpu_workload import Size, Training

    importlib.import_module(LIBRARIES[config["saver"]])
    notes.add("imported")

    size, device = Size(**config["size"]), torch.device(config["device"])
    with device:  # parameters are initialized on the device
        training = Training(size, device, data=torch.randint(size.vocabulary, (1 << 20,), dtype=torch.int32))
    training.create_moments()
    state: State = {**training.state(), "counts": training.counts()}
    training.synchronize()
    notes.add("model built")

    made = saver(config["saver"], folder, training.optimizer)
    notes.add("saver made")
    restored = made.restore(state)
    training.synchronize()
    notes.add("restored" if restored else "nothing to restore", bytes_read=read.by_source)
    if restored:
        found = digest(state)
        training.synchronize()
        notes.add("checked", digest=found)
        training.run(1)
        training.synchronize()
        notes.add("first step done")
        made.close()
        return
    training.run(STEPS)
    notes.add("saving", digest=digest(state), step=training.step)
    made.save(state, training.step)
    notes.add("durable")
    training.run(STEPS)
    notes.add("ready to be killed", changed=digest(state))
    end = time.monotonic() + _LONGEST
    while time.monotonic() < end:
        training.run(1)
    raise TimeoutError("this process was not killed")
