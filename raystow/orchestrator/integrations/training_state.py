"""The state of a torch training for the trainers of other libraries: weights, optimizers and random generators."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ...storage.arguments import integer
from ...storage.errors import StateError
from ...storage.version import Version
from ...storage.version_selector import VersionSelector
from ..client.checkpointer import Checkpointer
from ..save.state_tree import State


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
) -> tuple[Version, State] | None:
    """Restore a version into the tensors of a training, and return it with its state, which has the text ``trainer``, too. None
    if there is no version: the optimizers are as before then."""
    new = [optimizer for optimizer in optimizers if not optimizer.state]
    state = {**_initialized(model, optimizers), "trainer": ""}
    found = checkpointer.restore(state, version)
    if found is None:
        _forget(new)
        return None
    return found, state


def _forget(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Remove the state that ``get_state_dict`` has made by a step at learning rate 0, which Adam would count."""
    for optimizer in optimizers:
        optimizer.state.clear()


def _initialized(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> State:
    weights, moments = get_state_dict(model, list(optimizers))
    return {"model": with_own_buffers(model, weights), "optim": moments, **rng()}


def with_own_buffers(model: torch.nn.Module, weights: State) -> State:
    """Return ``weights`` with copies of the buffers: unlike parameters, they change before the optimizer step."""
    buffers = {name for name, _ in model.named_buffers()}
    return {name: value.clone() if name in buffers else value for name, value in weights.items()}


def rng() -> dict[str, bytes]:
    """Return the states of torch's random generators, as in ``state_of``."""
    on_gpu = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else b""
    return {"rng": torch.get_rng_state().numpy().tobytes(), "rng_cuda": on_gpu}


def journal_options(journal: bool, durable_every: int) -> tuple[bool, int]:
    """Return a callback's options for the journal. ``StateError`` if only the second one is given."""
    if durable_every and not journal:
        raise StateError("durable_every without a journal", remedy="pass journal=True")
    return journal, integer("durable_every", durable_every, least=0)


def progress_text(progress: State) -> str:
    """Return the progress of a trainer as one text, since its names vary. ``StateError`` if it is not JSON."""
    try:
        return json.dumps(progress)
    except (TypeError, ValueError) as error:
        what = f"the state of loops, callbacks or learning rate schedulers is not JSON: {error}"
        raise StateError(what, remedy="give the data loader, callback or scheduler a state of plain values") from error


def load(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: State) -> None:
    """Load a restored result of ``state_of``, except the random generators."""
    set_state_dict(model, list(optimizers), model_state_dict=state["model"], optim_state_dict=state["optim"])


def load_rng(state: State) -> None:
    """Set torch's random generators; the one of the GPU only if it was saved and there is a GPU."""
    torch.set_rng_state(_tensor(state["rng"]))
    if state["rng_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["rng_cuda"]))


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
