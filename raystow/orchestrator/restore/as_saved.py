"""``AsSaved``: a place in ``into`` that takes what was saved there, whatever its structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...state.tree import Elements, Placeholder
from ...storage.arguments import refused
from ...storage.coding import dtypes
from ...storage.errors import StateError, Unsupported
from ...storage.format import values
from ...storage.format.manifest import SCALAR, TENSOR, Chunk, Value, parse_path
from ...storage.versions.tensor_index import FoundRows
from ...storage.versions.value_tree import Path, beneath, rows_of_one_rank
from ...storage.versions.version import Version

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


@dataclass(frozen=True)
class CheckedAsSaved(AsSaved):
    """A marker for plain values. ``check`` is called with what was saved before anything is filled, and raises what the restore
    raises."""

    check: Callable[[object], None] = field(kw_only=True)


def rows_beneath(
    name: str, found: FoundRows, around: dict[str, list[Value]], rank: int
) -> Iterator[tuple[Path, Value | list[Chunk]]]:
    """What a version has under the name of a marker: a rank's values and all tensors, by path from there. ``around``: values by
    the names of their containers."""
    for row in rows_of_one_rank(around.get(name, ()), rank):
        path = beneath(name, parse_path(row.path))
        assert path is not None
        yield path, row
    for chunks in found.chunks.values():
        if chunks and (path := beneath(name, parse_path(chunks[0].path))) is not None:
            yield path, chunks


def target(version: Version, rows: Sequence[Chunk], device: str | torch.device) -> Elements | np.generic:
    """Memory for a tensor or array of a version, whose coverage is checked first; a numpy scalar itself."""
    first = rows[0]
    version.check_covered(first.name, rows)
    if first.kind == SCALAR:
        scalar: np.generic = version.assemble(first.name, rows)
        return scalar
    if first.kind == TENSOR:
        try:
            import torch
        except ImportError:
            pass
        else:
            dtype = getattr(torch, first.dtype, None)
            if dtype is None:
                raise Unsupported(f"torch {torch.__version__} has no {first.dtype}", subject=first.name, remedy="upgrade torch")
            try:
                return torch.empty(first.shape, dtype=dtype, device=device)
            except (RuntimeError, AssertionError) as error:  # no such device, or not enough memory
                raise StateError(f"no memory for {first.dtype} {first.shape}: {error}", subject=first.name) from error
    return np.empty(first.shape, dtypes.to_numpy(first.dtype))


def load(row: Value) -> object:
    """The value of a row."""
    return values.loads(row.text)
