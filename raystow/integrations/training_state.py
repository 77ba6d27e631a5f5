"""The state of a torch training for the trainers of other libraries: weights, optimizers, progress and random generators.

Progress is everything but weights and optimizers: states of schedulers, loops, callbacks and data loaders. Its structure varies,
and its tensors differ between ranks, so each rank saves its own as one text.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import random  # noqa: TID251  nothing is drawn: only its state is saved
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ..orchestrator import argument_checks
from ..orchestrator.client.checkpointer import Checkpointer
from ..state import value_text
from ..state.tree import State
from ..storage.arguments import integer
from ..storage.errors import Damaged, StateError
from ..storage.format.values import is_plain
from ..storage.versions.version import Version
from ..storage.versions.version_selector import VersionSelector

logger = logging.getLogger(__name__)

_PROGRESS = "trainer"
"""The key of the text in the state."""
_UNNAMED = "optimizers"


def saved(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], progress: State) -> State:
    """Return a training to save. ``StateError`` names the part of ``progress`` that cannot be saved."""
    named, unnamed = _named(optimizers)
    whole = {**progress, _UNNAMED: [optimizer.state_dict() for optimizer in unnamed]}
    return {**state_of(model, named), _PROGRESS: progress_text(whole)}


def _named(
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[list[torch.optim.Optimizer], list[torch.optim.Optimizer]]:
    """The optimizers whose state torch can give by the names of parameters, and those, as LBFGS, that cannot make it without a
    closure: its state grows, and is saved with the progress."""
    named, unnamed = list[torch.optim.Optimizer](), list[torch.optim.Optimizer]()
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        (unnamed if closure is not None and closure.default is inspect.Parameter.empty else named).append(optimizer)
    return named, unnamed


def state_of(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> State:
    """Return weights and optimizer state by the names of the unwrapped ``model``, to save.

    An optimizer without state stays so.
    """
    new = [optimizer for optimizer in optimizers if not optimizer.state]
    state = _initialized(model, optimizers)
    _forget(new)
    return state


def restored(
    checkpointer: Checkpointer, version: VersionSelector, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Version, State, State] | None:
    """Restore a version into the tensors of a training, and return it with its state and its progress. None if there is no
    version: the optimizers are as before then."""
    optimizers, _ = _named(optimizers)
    new = [optimizer for optimizer in optimizers if not optimizer.state]
    state = {**_initialized(model, optimizers), _PROGRESS: ""}
    found = checkpointer.restore(state, version)
    if found is None:
        _forget(new)
        return None
    progress = value_text.loads(state[_PROGRESS])
    if not isinstance(progress, dict) or _UNNAMED not in progress:
        raise Damaged("not the progress of a trainer", subject=repr(found))
    return found, {**state, _UNNAMED: progress.pop(_UNNAMED)}, progress


def _forget(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Remove the state that ``get_state_dict`` has made by a step at learning rate 0, which Adam would count."""
    for optimizer in optimizers:
        optimizer.state.clear()


def _initialized(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> State:
    weights, moments = get_state_dict(model, list(optimizers))
    return {"model": with_own_buffers(model, weights), "optim": moments}


def with_own_buffers(model: torch.nn.Module, weights: State) -> State:
    """Return ``weights`` with copies of the buffers: unlike parameters, they change before the optimizer step."""
    buffers = {name for name, _ in model.named_buffers()}
    return {name: value.clone() if name in buffers else value for name, value in weights.items()}


def generators() -> State:
    """Return the states of the random generators of Python, numpy and torch, for ``load_generators``."""
    cuda = [torch.cuda.get_rng_state(device) for device in _devices()]
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def load_generators(states: State) -> None:
    """Set the random generators; those of GPUs that were saved and exist, where the current GPU gets the state of that of the
    save."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for device, state in zip(_devices(), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)


def _devices() -> list[int]:
    """The GPUs that this process sees, the current one first."""
    if not torch.cuda.is_available():
        return []
    current = torch.cuda.current_device()
    return sorted(range(torch.cuda.device_count()), key=lambda device: (device != current, device))


def journal_options(journal: bool, durable_every: int) -> tuple[bool, int]:
    """Return a callback's options for the journal. ``StateError`` if only the second one is given."""
    if durable_every and not journal:
        raise StateError("durable_every without a journal", remedy="pass journal=True")
    return journal, integer("durable_every", durable_every, least=0)


def progress_text(progress: State) -> str:
    """Return the text of a progress, of which ``StateError`` names the part that cannot be saved."""
    return value_text.dumps(progress, what=_PROGRESS)


def load(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: State) -> None:
    """Load the state that ``restored`` has returned, or a result of ``state_of``."""
    named, unnamed = _named(optimizers)
    set_state_dict(model, named, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for optimizer, own in zip(unnamed, state.get(_UNNAMED, ()), strict=False):
        optimizer.load_state_dict(own)


def log_of(history: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return what a trainer has logged, to save. A warning names what is left out: the training goes on."""
    return [{name: value for name, value in logs.items() if is_plain(value) or _storable(name, value)} for logs in history]


def _storable(name: str, value: object) -> bool:
    try:
        value_text.dumps(value)
    except StateError:
        _leave_out(name, type(value).__name__, "cannot be saved")
        return False
    return True


def metrics_of(logged: Mapping[str, object]) -> dict[str, int | float]:
    """Return the numbers among what a trainer has logged, as metrics of a version. A warning names what is left out: the training
    goes on."""
    found: dict[str, int | float] = {}
    for name, value in logged.items():
        with contextlib.suppress(StateError):
            number = argument_checks.metrics_of({name: value})[name]
            if isinstance(number, int | float):
                found[name] = number
        if name not in found:
            _leave_out(name, type(value).__name__, "is not a number, and no metric of the version")
    return found


@functools.cache  # once for each, as each save finds them again
def _leave_out(name: object, kind: str, why: str) -> None:
    logger.warning("the logged value %r of type %s %s", name, kind, why)
