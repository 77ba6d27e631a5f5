"""``AsSaved``: a place in ``into`` that takes what was saved there, whatever its structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..storage.arguments import refused
from .tree import Elements, Path, Placeholder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AsSaved(Placeholder):
    """Stand in ``into`` for a tensor, value or container that is restored as it was saved, whatever its structure.

    For state that grows: a replay buffer, the history of LBFGS, the state of an optimizer that has not made a step. After the
    restore the dict, list or tuple around it has in its place what the version has: tensors on ``device``, numpy arrays, and this
    rank's plain values. Tensors that ranks have saved in shards come back whole, as plain tensors, so each rank needs memory for
    all of them. Tensor subclasses come back as dicts of their inner tensors.

    Args:
        device: The device of tensors, as ``torch.device`` takes it.

    Raises:
        StateError: There is no such device.

    Example:
        >>> into = {"model": model.state_dict(), "replay": raystow.AsSaved()}
        >>> checkpointer.restore_latest(into=into)
        >>> replay = into["replay"]
    """

    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        if self.device == "cpu":  # works without torch
            return
        try:
            import torch

            if not isinstance(self.device, str | torch.device) or torch.device(self.device).type == "meta":
                raise TypeError
        except (ImportError, TypeError, RuntimeError):
            raise refused("device", self.device, "a device with memory, such as 'cpu' or 'cuda'") from None

    def _takes(self, path: Path) -> bool:
        """Whether a tensor that was saved at this path from the marker is restored."""
        return True

    def _memory(self, path: Path, dtype: str, shape: tuple[int, ...]) -> Elements | None:
        """The tensor that is filled with what was saved at this path; None for a new one on ``_device(path)``."""
        return None

    def _device(self, path: Path) -> str | torch.device:
        return self.device

    def _like(self) -> Mapping[str, Elements]:
        """By the name beneath the marker, tensors that are sharded as those right beneath it."""
        return {}

    def _check(self, whole: object) -> None:
        """Raise what the restore raises if it cannot use what was saved. Called before anything is filled."""


@dataclass(frozen=True)
class CheckedAsSaved(AsSaved):
    """A marker for plain values. ``check`` is called with what was saved before anything is filled, and raises what the restore
    raises."""

    check: Callable[[object], None] = field(kw_only=True)

    def _check(self, whole: object) -> None:
        self.check(whole)
