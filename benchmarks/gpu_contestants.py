"""The contestants of the GPU benchmarks behind one interface: raystow and other checkpointers.

Each is used as its documentation recommends. All write whole states to the same file system and report when they are durable.

- raystow: ``Checkpointer`` in the training process, on a Ray cluster of this machine; one contestant per codec, one whose node
  worker encodes (``process="node"``), one that is given modules and an optimizer, and one that is given their state dicts.
- torch.save: training waits for the whole save.
- DCP: ``async_save`` whose stager keeps its pinned memory.
- torch_checkpointing: ``CheckpointManager`` with asynchronous saves, fenced by its lock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_workload import State, Training

Wait = Callable[[], Any]
"""A function that returns when a save is durable and raises if the save failed. It is called on a separate thread."""

TORCH_SAVE, DCP, TORCH_CHECKPOINTING = "torch.save", "DCP async pinned", "torch_checkpointing"
PEERS = (TORCH_SAVE, DCP, TORCH_CHECKPOINTING)
NONE = "no save"
NODE = "raystow deflate, node"
OBJECTS, DICTS = "raystow deflate, objects", "raystow deflate, state dicts"
MEMORY, SECOND = "raystow, node's memory", "raystow, node's memory, second Checkpointer"
HOST, PINNED, BY_CPU = "raystow, host memory", "raystow, pinned host memory", "raystow, host memory, by the CPU"


class Contestant:
    """A contestant that saves nothing, to measure the noise. ``save`` may return early; ``fence`` precedes each update."""

    def state_of(self, training: Training) -> Any:
        """Return what is given to ``save``; making it is part of the save."""
        return training.state()

    def save(self, state: Any, step: int) -> Wait:
        return lambda: None

    def fence(self) -> None: ...

    def load(self, into: State) -> None:
        """Load the newest checkpoint into these tensors."""

    def stored(self) -> int:
        """Return the bytes of all files of the newest checkpoint."""
        return 0

    def discard(self) -> None:
        """Delete the newest checkpoint."""

    def close(self) -> None: ...


class Folder(Contestant):
    """A contestant with one folder per checkpoint."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root

    def save(self, state: Any, step: int) -> Wait:
        self._path = self._root / str(step)
        return self._save(state)

    def _save(self, state: State) -> Wait:
        raise NotImplementedError

    def stored(self) -> int:
        return size(self._path)

    def discard(self) -> None:
        shutil.rmtree(self._path)


class TorchSave(Folder):
    """torch.save: one file, written while training waits."""

    def _save(self, state: State) -> Wait:
        self._path.mkdir(parents=True)
        torch.save(state, self._path / "state.pt")
        return lambda: None

    def load(self, into: State) -> None:
        device = next(iter(next(iter(into.values())).values())).device
        found = torch.load(self._path / "state.pt", map_location=device, weights_only=True)
        for group, tensors in into.items():
            for name, tensor in tensors.items():
                tensor.copy_(found[group][name])


class Dcp(Folder):
    """torch.distributed.checkpoint in a process group of one."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        if not dist.is_initialized():
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, rank=0, world_size=1)
        self._dcp = dcp
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())

    def _save(self, state: State) -> Wait:
        wait: Wait = self._dcp.async_save(state, checkpoint_id=str(self._path), async_stager=self._stager).result
        return wait

    def load(self, into: State) -> None:
        self._dcp.load(into, checkpoint_id=str(self._path))


class TorchCheckpointing(Folder):
    """torch_checkpointing, PyTorch's successor to DCP."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config.with_async_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # ext4 refuses what 0.1.1 writes directly
        self._manager = CheckpointManager(config)

    def _save(self, state: State) -> Wait:
        wait: Wait = self._manager.save(str(self._path), state).result
        return wait

    def fence(self) -> None:
        with self._manager.lock():
            pass

    def load(self, into: State) -> None:
        self._manager.load(str(self._path), into=into)

    def close(self) -> None:
        self._manager.close()


class Raystow(Contestant):
    """raystow; a discarded version keeps its root entry and manifest but not its packs."""

    def __init__(self, root: Path, codec: str, memory: int | None, **options: Any) -> None:
        import raystow

        self._root = root
        self.checkpointer = raystow.Checkpointer(
            str(root), rank=0, world_size=1, memory=raystow.Memory(memory), compression=raystow.Compression(codec, **options)
        )

    def save(self, state: Any, step: int) -> Wait:
        return self.checkpointer.save(state, step=step).result

    def fence(self) -> None:
        self.checkpointer.fence()

    def load(self, into: State) -> None:
        import raystow

        raystow.restore_latest(str(self._root), into=into)

    def stored(self) -> int:
        return size(self._newest()) + (self._root / "root.json").stat().st_size

    def discard(self) -> None:
        for pack in self._newest().glob("*.pack"):
            pack.unlink()

    def close(self) -> None:
        self.checkpointer.close()

    def _newest(self) -> Path:
        return max((self._root / "versions").iterdir())


class RaystowMemory(Raystow):
    """raystow, whose training rolls back: it restores from the memory of its node, in which its ring keeps the version."""

    def load(self, into: State) -> None:
        self.checkpointer.restore_latest(into=into, allow_uncommitted=False)


class RaystowSecond(Raystow):
    """raystow, whose version another Checkpointer of the process restores, each time a new one."""

    def load(self, into: State) -> None:
        import raystow

        with raystow.Checkpointer(str(self._root), rank=0, world_size=1) as second:
            second.restore_latest(into=into, allow_uncommitted=False)


class RaystowObjects(Raystow):
    """raystow, given the modules and the optimizer themselves."""

    def state_of(self, training: Training) -> Any:
        return training.objects()


class RaystowDicts(Raystow):
    """raystow, given the state dicts of the same objects."""

    def state_of(self, training: Training) -> Any:
        return {name: one.state_dict() for name, one in training.objects().items()}


class RaystowHost(Raystow):
    """raystow, given a copy of the state in host memory, as of an offloaded optimizer, which this training does not change."""

    def __init__(self, root: Path, memory: int | None, *, pinned: bool, **options: Any) -> None:
        super().__init__(root, "deflate", memory, delta=0, **options)
        self._pinned = pinned
        self._copy: State = {}

    def state_of(self, training: Training) -> Any:
        if not self._copy:
            for group, tensors in training.state().items():
                of = self._copy[group] = {name: tensor.cpu() for name, tensor in tensors.items()}
                self._copy[group] = {name: tensor.pin_memory() for name, tensor in of.items()} if self._pinned else of
        return self._copy


def ours(codec: str) -> str:
    """Return the name of raystow with this codec."""
    return f"raystow {codec}"


def field(root: Path, codecs: tuple[str, ...], memory: int | None) -> dict[str, Callable[[], Contestant]]:
    """Return a factory for each contestant by name; each contestant has its own folder below ``root``."""
    return {
        **{ours(codec): partial(Raystow, root / f"raystow-{codec}", codec, memory) for codec in codecs},
        NODE: partial(Raystow, root / "raystow-node", "deflate", memory, process="node"),
        TORCH_SAVE: lambda: TorchSave(root / "torch-save"),
        DCP: lambda: Dcp(root / "dcp"),
        TORCH_CHECKPOINTING: lambda: TorchCheckpointing(root / "torch-checkpointing"),
    }


def of_node_memory(root: Path, codec: str, memory: int | None) -> dict[str, Callable[[], Contestant]]:
    """Return factories, as ``field`` does, for the contestants that restore from the memory of their node."""
    return {
        MEMORY: partial(RaystowMemory, root / "raystow-memory", codec, memory),
        SECOND: partial(RaystowSecond, root / "raystow-second", codec, memory),
    }


def of_objects(root: Path, memory: int | None) -> dict[str, Callable[[], Contestant]]:
    """Return factories, as ``field`` does, for the contestants that save objects and their state dicts."""
    return {
        OBJECTS: partial(RaystowObjects, root / "raystow-objects", "deflate", memory),
        DICTS: partial(RaystowDicts, root / "raystow-dicts", "deflate", memory),
    }


def of_host_memory(root: Path, memory: int | None) -> dict[str, Callable[[], Contestant]]:
    """Return factories for the contestants that save tensors in host memory."""
    return {
        HOST: partial(RaystowHost, root / "raystow-host", memory, pinned=False),
        PINNED: partial(RaystowHost, root / "raystow-pinned", memory, pinned=True),
        BY_CPU: partial(RaystowHost, root / "raystow-by-cpu", memory, pinned=False, host="cpu"),
    }


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def start_ray() -> None:
    """Start a Ray cluster on this machine. New processes use compiled bytecode, as packages installed by pip do."""
    import ray

    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

    ray.init(
        address="local",
        num_cpus=os.cpu_count() or 1,
        num_gpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,  # no checkpoint data goes through it
    )
