"""``Rng``: the random generators of this process as an object with a state."""

from __future__ import annotations

import logging
import random  # noqa: TID251  nothing is drawn: states are read and set
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

import numpy as np

from ..storage.coding.digest import stored_digest
from ..storage.errors import StateError
from .tree import State

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Rng:
    """Stand in a state for the random generators of each rank: of Python, numpy, torch and each CUDA device.

    It is saved per rank, without ``PerRank``, after all other objects, and restored after them. On more ranks than have saved,
    each new rank gets a stream of its own that depends only on the version and the rank.

    Example:
        >>> state = {"model": model, "optimizer": optimizer, "rng": raystow.Rng()}
    """

    def state_dict(self) -> State:
        """Return the states of the generators, as plain values.

        Returns:
            ``python``: a dict of ``version``, ``state`` (625 little-endian uint32 as bytes) and ``gauss``; ``numpy``: what
            ``numpy.random.get_state(legacy=False)`` returns, arrays of uint32 as bytes; with torch ``torch`` (bytes of
            ``get_rng_state``) and ``cuda``, a list of the same for each device of this process, the current one first.
        """
        states: State = {"python": _python(random.getstate()), "numpy": _plain(np.random.get_state(legacy=False))}
        torch = sys.modules.get("torch")
        if torch is not None:
            states["torch"] = torch.get_rng_state().numpy().tobytes()
            states["cuda"] = [torch.cuda.get_rng_state(device).numpy().tobytes() for device in _devices(torch)]
        return states

    def load_state_dict(self, state: State) -> None:
        """Set the generators.

        Args:
            state: A result of ``state_dict``. Devices that are not there are left out.

        Raises:
            StateError: ``state`` is none.
        """
        try:
            python = state["python"]
            words = np.frombuffer(python["state"], "<u4")
            random.setstate((python["version"], tuple(map(int, words)), python["gauss"]))
            np.random.set_state(_arrays(state["numpy"]))
            if "torch" in state:
                import torch

                torch.set_rng_state(_tensor(state["torch"]))
                for device, one in zip(_devices(torch, start=bool(state["cuda"])), state["cuda"], strict=False):
                    torch.cuda.set_rng_state(_tensor(one), device)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StateError(f"not the state of random generators: {error}", subject="raystow.Rng") from error

    def load_rank_states(self, states: Sequence[State], rank: int, world_size: int) -> None:
        """Set the generators from those of another number of ranks: each rank gets its own, a new rank a stream of its own.

        Args:
            states: Results of ``state_dict``, by rank.
            rank: This rank.
            world_size: The number of ranks now.
        """
        low, high = sorted((len(states), world_size))
        if rank == 0 and low < high:
            which = f"ranks {low} to {high - 1}" if low < high - 1 else f"rank {low}"
            how = "are derived from the version and the rank" if high == world_size else "end"
            logger.warning("%d ranks have saved, %d restore: the random streams of %s %s", len(states), world_size, which, how)
        self.load_state_dict(states[rank] if rank < len(states) else _derived(states[0], rank))


def _derived(state: State, rank: int) -> State:
    """A state of generators that depends on this one and the rank only."""
    digest = stored_digest(repr(sorted(state.items())).encode(), b"rank %d" % rank)
    seeds = [int(seed) for seed in np.frombuffer(digest, "<u4")]
    numpy = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds)))
    made = {
        "python": _python(random.Random(int.from_bytes(digest, "little")).getstate()),
        "numpy": _plain(numpy.get_state(legacy=False)),
    }
    if "torch" in state:
        import torch

        made["torch"] = torch.Generator().manual_seed(seeds[0] << 31 ^ seeds[1]).get_state().numpy().tobytes()
        made["cuda"] = [
            np.array([seeds[2] << 31 ^ seeds[3] + number, 0], "<i8").tobytes()  # seed and offset of the device's Philox
            for number in range(len(state["cuda"]))
        ]
    return made


def _python(state: tuple[object, ...]) -> State:
    version, words, gauss = state
    return {"version": version, "state": np.array(words, "<u4").tobytes(), "gauss": gauss}


def _plain(state: object) -> object:
    """A state of numpy with bytes in place of arrays."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return state.astype(f"<u{state.itemsize}").tobytes()
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: State) -> State:
    return cast(State, _array(state, "<u8" if state["bit_generator"] in ("Philox", "SFC64") else "<u4"))


def _array(value: object, wide: str) -> object:
    if isinstance(value, dict):
        return {key: _array(inner, wide) for key, inner in value.items()}
    return np.frombuffer(value, wide).copy() if isinstance(value, bytes) else value


def _tensor(content: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _devices(torch: ModuleType, *, start: bool = False) -> list[int]:
    """The GPUs that this process sees, the current one first; none if CUDA is not in use. ``start``: CUDA may be started."""
    if not torch.cuda.is_available() or not (start or torch.cuda.is_initialized()):
        return []
    current = torch.cuda.current_device()
    return sorted(range(torch.cuda.device_count()), key=lambda device: (device != current, device))
