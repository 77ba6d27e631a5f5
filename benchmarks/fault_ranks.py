"""The training processes of ``faults.py``: each restores, saves after each step, and logs its events to a file."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

REGION, RANKS, NUMBERS, STEP = "us-east-1", 2, 2_000_000, 0.2


@dataclass(frozen=True)
class Place:
    """One rank of a training: the saver's name, where it saves, and the folder of its notes."""

    saver: str
    uri: str
    rank: int
    folder: Path

    def note(self, event: str, step: int = 0, **more: object) -> None:
        """Append an event to the log."""
        line = {"at": time.time(), "rank": self.rank, "event": event, "step": step, **more}
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


class Saver(Protocol):
    """One library, in one rank."""

    def restore(self, state: dict[str, Any]) -> int:
        """Fill the state from the newest checkpoint; return its step, 0 if there is none."""

    def save(self, state: dict[str, Any], step: int) -> None:
        """Save the state; return when it is durable."""


class Raystow:
    """raystow."""

    def __init__(self, place: Place) -> None:
        import raystow

        self._checkpointer = raystow.Checkpointer(place.uri, rank=place.rank, world_size=RANKS)

    def restore(self, state: dict[str, Any]) -> int:
        """See ``Saver``."""
        version = self._checkpointer.restore_latest(into=state)
        return 0 if version is None else version.step

    def save(self, state: dict[str, Any], step: int) -> None:
        """See ``Saver``."""
        self._checkpointer.save(state, step=step).result()


class Dcp:
    """torch.distributed.checkpoint with a writer for S3, one folder for each step."""

    def __init__(self, place: Place) -> None:
        from torch import distributed

        group = os.environ["FAULTS_GROUP"]
        distributed.init_process_group("gloo", init_method=group, rank=place.rank, world_size=RANKS)
        self._uri, self._connector = place.uri, place.saver == "DCP with s3torchconnector"

    def _steps(self) -> list[int]:
        import boto3

        bucket, _, prefix = self._uri.removeprefix("s3://").partition("/")
        pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [one["Key"] for page in pages for one in page.get("Contents", ())]
        return sorted(int(key.split("/")[-2]) for key in keys if key.endswith("/.metadata"))

    def restore(self, state: dict[str, Any]) -> int:
        """See ``Saver``."""
        from torch.distributed import checkpoint

        steps = self._steps()
        if steps:
            checkpoint.load(state, storage_reader=self._end("Reader", f"{self._uri}/{steps[-1]}"))
        return steps[-1] if steps else 0

    def save(self, state: dict[str, Any], step: int) -> None:
        """See ``Saver``."""
        from torch.distributed import checkpoint

        checkpoint.save(state, storage_writer=self._end("Writer", f"{self._uri}/{step}"))

    def _end(self, end: str, path: str) -> Any:
        if self._connector:
            import s3torchconnector
            from s3torchconnector import dcp

            config = s3torchconnector.S3ClientConfig(force_path_style=True)
            return getattr(dcp, f"S3Storage{end}")(REGION, path, s3client_config=config)
        from torch.distributed.checkpoint import _fsspec_filesystem as fsspec

        return getattr(fsspec, f"Fsspec{end}")(path)


class RayTrain:
    """``ray.train.report`` with a folder that rank 0 has written, as for replicated states."""

    def __init__(self, place: Place) -> None:
        self._rank = place.rank

    def restore(self, state: dict[str, Any]) -> int:
        """See ``Saver``."""
        import torch
        from ray import train

        newest = train.get_checkpoint()
        if newest is None:
            return 0
        with newest.as_directory() as folder:
            for name, tensor in torch.load(Path(folder) / "state.pt").items():
                state[name].copy_(tensor)
        return int(state["step"])

    def save(self, state: dict[str, Any], step: int) -> None:
        """See ``Saver``."""
        import torch
        from ray import train

        with tempfile.TemporaryDirectory() as folder:
            written = None
            if self._rank == 0:
                torch.save(state, Path(folder) / "state.pt")
                written = train.Checkpoint.from_directory(folder)
            train.report({"step": step}, checkpoint=written)


SAVERS: dict[str, Callable[[Place], Saver]] = {
    "raystow": Raystow,
    "DCP with s3fs": Dcp,
    "DCP with s3torchconnector": Dcp,
    "ray.train.report": RayTrain,
}


def run(place: Place) -> None:
    """Run one rank until it is killed."""
    with (place.folder / f"stack-{place.rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        place.note("started", pid=os.getpid())
        try:
            _train(place)
        except BaseException as error:
            place.note("crashed", reason=" ".join(f"{type(error).__name__}: {error}".split())[:400])
            raise
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _train(place: Place) -> None:
    import torch

    made = SAVERS[place.saver](place)
    state = {"w": torch.zeros(NUMBERS), "step": torch.zeros((), dtype=torch.int64)}
    step = made.restore(state)
    place.note("restored", step, whole=bool((state["w"] == _values(step)).all()) and int(state["step"]) == step)
    while True:
        time.sleep(STEP)
        step += 1
        state["w"].copy_(_values(step))
        state["step"].fill_(step)
        place.note("saving", step)
        made.save(state, step)
        place.note("durable", step)


def _values(step: int) -> Any:
    """Return the weights after a step."""
    import torch

    return torch.zeros(NUMBERS) if step == 0 else torch.randn(NUMBERS, generator=torch.Generator().manual_seed(step))


def run_in_ray_train(uri: str, folder: Path) -> None:
    """Run the driver of a training by Ray Train, which restarts its ranks when one fails."""
    from pyarrow import fs
    from ray import train
    from ray.train.torch import TorchTrainer

    def each_rank() -> None:
        run(Place("ray.train.report", uri, train.get_context().get_world_rank(), folder))

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    config = train.RunConfig(
        name="run",
        storage_path=uri.removeprefix("s3://"),
        storage_filesystem=fs.S3FileSystem(endpoint_override=endpoint, region=REGION),
        failure_config=train.FailureConfig(max_failures=-1),
    )
    TorchTrainer(each_rank, scaling_config=train.ScalingConfig(num_workers=RANKS), run_config=config).fit()


def stack_of(folder: Path, rank: int, pid: int) -> str:
    """Return the stack of a rank, innermost call first."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    threads = (folder / f"stack-{rank}").read_text().split("\n\n")
    lines = [line for thread in threads if Path(__file__).name in thread for line in thread.splitlines() if "File" in line]
    frames = [(line.split('"')[1].split("/"), line.rpartition(" in ")[2]) for line in lines]
    return " < ".join(f"{function} ({'/'.join(path[-2:])})" for path, function in frames[:6])
