"""One rank of a real training: a small GPT under FSDP2, on the text of the demo.

The data of a rank depend only on step and rank, so an undisturbed run with the same number of ranks has, bit for bit, the state
that a disturbed run must have. The ranks train that run first, without raystow, and keep its states in files.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import raystow
from drills.drill_cluster import DEADLINE
from raystow.demo.model import GPT, batch, corpus, loss_of
from raystow.storage.runtime.clock import SYSTEM

PATIENCE = datetime.timedelta(seconds=60)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class ReadLog(logging.Handler):
    """Counts the bytes that restores in this process have read by source, from raystow's log."""

    def __init__(self) -> None:
        super().__init__()
        self.read = Counter[str]()
        logger = logging.getLogger("raystow")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.read.update(getattr(record, "bytes_read", {}))


@dataclass(frozen=True)
class Place:
    """A rank of the ``group``-th process group of this training."""

    folder: Path
    group: int
    rank: int
    world: int

    @property
    def note(self) -> Path:
        """Return the file in which the rank records its finished steps."""
        return self.folder / f"step-{self.group}-{self.rank}"


class Rank:
    """One rank of one process group; a restarted training has new ranks."""

    def __init__(self, place: Place, uri: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        where = f"file://{place.folder}/group-{place.group}"
        self.rank, self.world, self._folder, self._data = place.rank, place.world, place.folder, corpus()
        dist.init_process_group("gloo", init_method=where, rank=self.rank, world_size=self.world, timeout=PATIENCE)
        self._mesh = init_device_mesh("cpu", (self.world,))
        self._note = os.open(place.note, os.O_CREAT | os.O_RDWR)
        self._log, self._pending = ReadLog(), list[raystow.Pending]()
        self.checkpointer = raystow.Checkpointer(uri, rank=self.rank, world_size=self.world, **options)
        self.start_over()

    def start_over(self) -> None:
        """Create the state of step 0."""
        torch.manual_seed(0)
        self.model = GPT(width=128, layers=2)
        for block in self.model.blocks:
            fully_shard(block, mesh=self._mesh)
        fully_shard(self.model, mesh=self._mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.checkpointer.guard(self.optimizer)
        self.step = 0

    def train(self, until: int) -> None:
        """Train up to a step, and record each finished step in a file."""
        while self.step < until:
            loss = loss_of(self.model, batch(self._data, step=self.step + 1, rank=self.rank, size=2))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            os.pwrite(self._note, self.step.to_bytes(8, "little"), 0)

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": weights, "optim": moments, "step": self.step}

    def put(self, state: dict[str, Any]) -> None:
        """Load ``state`` into the model and the optimizer."""
        weights, moments = state["model"], state["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
        self.step = state["step"]

    def save(self) -> None:
        """Start a save."""
        self._pending.append(self.checkpointer.save(self.state(), step=self.step))

    def fence(self) -> None:
        self.checkpointer.fence()

    def result(self, timeout: float = DEADLINE) -> int:
        """Return the version id of the oldest save without a requested result; raise ``SaveFailed`` if it failed."""
        return self._pending.pop(0).result(timeout).id

    def failure(self, timeout: float = DEADLINE) -> str:
        """Return the reason why the oldest save without a requested result failed."""
        try:
            version = self.result(timeout)
        except raystow.SaveFailed as error:
            return str(error)
        raise AssertionError(f"it has become version {version}")

    def restore(self) -> tuple[int, dict[str, int], float]:
        """Restore the newest version; return its step, the bytes read by source, and the duration in seconds."""
        state, begun = self.state(), SYSTEM.monotonic()
        self._log.read.clear()
        version = self.checkpointer.restore_latest(into=state)
        seconds = SYSTEM.monotonic() - begun
        assert version is not None
        self.put(state)
        assert self.step == version.step
        return version.step, dict(self._log.read), seconds

    def rehearse(self, steps: Sequence[int], since: str | None) -> None:
        """Train without a disturbance, starting at a state in a file or at step 0, and write the states of these steps to
        files; then reset to step 0."""
        if since is not None:
            self.put(self._from_file(since))
        for step in steps:
            self.train(step)
            whole = self._whole()
            if self.rank == 0:
                save_file(whole, wanted(self._folder, self.world, step))
        self.start_over()

    def check(self, world: int) -> None:
        """Assert that this state is, bit for bit, that of an undisturbed training of ``world`` ranks."""
        check_same(self._whole(), load_file(wanted(self._folder, world, self.step)))

    def pid(self) -> int:
        return os.getpid()

    def do(self, what: Any, *args: Any) -> Any:
        """Call ``what(self, *args)`` in this process."""
        return what(self, *args)

    def _whole(self) -> dict[str, torch.Tensor]:
        """Return all tensors by their names in a version, gathered from all ranks."""
        state = self.state()
        leaves = {f"{part}.{name}": leaf for part in ("model", "optim") for name, leaf in state[part].items()}
        whole = {name: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for name, leaf in leaves.items()}
        return {name: leaf.detach().clone() for name, leaf in whole.items() if isinstance(leaf, torch.Tensor)}

    def _from_file(self, path: str) -> dict[str, Any]:
        """Return the state in a file, with tensors sharded by torch and plain values of this rank."""
        state, whole = self.state(), load_file(path)
        for part in ("model", "optim"):
            for name, leaf in state[part].items():
                if isinstance(leaf, DTensor):
                    state[part][name] = distribute_tensor(whole[f"{part}.{name}"], self._mesh, leaf.placements)
                elif isinstance(leaf, torch.Tensor):
                    state[part][name] = whole[f"{part}.{name}"]
        return {**state, "step": int(Path(path).stem.rsplit("-", 1)[1])}


def wanted(folder: Path, world: int, step: int) -> str:
    """Return the file with the state of the undisturbed training of ``world`` ranks."""
    return str(folder / f"undisturbed-{world}-{step}.safetensors")


def check_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Assert that the tensors are equal, bit for bit."""
    assert got.keys() == wanted.keys()
    assert sum("exp_avg" in name for name in got) > 40, "there is no optimizer state"
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(bits(got[name]), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
