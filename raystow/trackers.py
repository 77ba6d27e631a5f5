"""Experiment trackers: callbacks for ``Checkpointer(callbacks=...)``."""

from .orchestrator.client.version_callbacks import VersionCallback
from .orchestrator.integrations.trackers import Mlflow, TensorBoard, Wandb

__all__ = ["Mlflow", "TensorBoard", "VersionCallback", "Wandb"]
