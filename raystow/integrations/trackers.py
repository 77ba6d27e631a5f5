"""Callbacks that log each version to an experiment tracker: its id, bytes, and how long its save held up the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ..storage import extras
from ..storage.errors import StateError
from ..storage.versions.version import Version

if TYPE_CHECKING:
    import wandb


class ScalarWriter(Protocol):
    """What ``TensorBoard`` needs of a ``SummaryWriter``: torch's or tensorboardX's."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Write one number."""


class Wandb:
    """Log versions to Weights & Biases.

    The figures are part of the next row that the training logs, and are plotted over ``raystow/step``: a version becomes durable
    after later steps were logged, whose rows are complete.

    Args:
        run: The run. None: the active one, of ``wandb.init``.
    """

    def __init__(self, run: wandb.Run | None = None) -> None:
        self._run, self._defined = run, False

    def on_version(self, version: Version) -> None:
        """Log a version.

        Args:
            version: The version.

        Raises:
            StateError: No run is active.
        """
        with extras.named():
            import wandb
        if (run := self._run or wandb.run) is None:
            raise StateError("no run of W&B is active", remedy="call wandb.init() before, or pass Wandb(run)")
        if not self._defined:
            run.define_metric("raystow/step")
            run.define_metric("raystow/*", step_metric="raystow/step")
            self._defined = True
        run.log({"raystow/step": version.step, **_figures(version)}, commit=False)


class Mlflow:
    """Log versions to a run of MLflow, at their steps.

    Args:
        run_id: The run. None: the one that is active in this thread now.
        client: A ``mlflow.MlflowClient``. None: one for the configured tracking server.
    """

    def __init__(self, run_id: str | None = None, client: Any = None) -> None:
        with extras.named():
            import mlflow
        active = mlflow.active_run()  # of this thread: callbacks run on another one
        self._run_id = run_id or (active.info.run_id if active is not None else None)
        self._client = client or mlflow.MlflowClient()

    def on_version(self, version: Version) -> None:
        """Log a version.

        Args:
            version: The version.

        Raises:
            StateError: No run was active.
        """
        if self._run_id is None:
            raise StateError("no run of MLflow was active", remedy="call mlflow.start_run() before, or pass Mlflow(run_id)")
        for name, value in _figures(version).items():
            self._client.log_metric(self._run_id, name, value, step=version.step)


class TensorBoard:
    """Log versions to TensorBoard, at their steps.

    Args:
        writer: A ``SummaryWriter`` of ``torch.utils.tensorboard`` or ``tensorboardX``.
    """

    def __init__(self, writer: ScalarWriter) -> None:
        self._writer = writer

    def on_version(self, version: Version) -> None:
        """Log a version.

        Args:
            version: The version.
        """
        for name, value in _figures(version).items():
            self._writer.add_scalar(name, value, version.step)


def _figures(version: Version) -> dict[str, float]:
    stall = version.stall
    return {
        "raystow/version": version.id,
        "raystow/raw_bytes": version.raw,
        "raystow/stored_bytes": version.bytes,
        **({"raystow/ratio": version.bytes / version.raw} if version.raw else {}),
        **({"raystow/stall_seconds": stall} if stall is not None else {}),
    }
