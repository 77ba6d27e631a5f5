"""Experiment trackers: callbacks for ``Checkpointer(callbacks=...)``."""

from .integrations.trackers import Mlflow, TensorBoard, Wandb
from .orchestrator.client.version_callbacks import VersionCallback

__all__ = ["Mlflow", "TensorBoard", "VersionCallback", "Wandb"]
