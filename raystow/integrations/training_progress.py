"""``TrainingProgress``: what a training needs to go on besides weights, optimizers and random generators."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..state import value_text
from ..state.tree import State
from ..storage.arguments import integer
from ..storage.errors import StateError

logger = logging.getLogger(__name__)


class TrainingProgress:
    """The states of schedules, loops, callbacks and data loaders as one object of a state. Each rank has its own. ``what``: names
    it in errors.

    They are stored as one text: their structure varies, and a trainer cannot tell it before its training has begun.

    Attributes:
        value: What is saved; after a restore, what was saved.
    """

    def __init__(self, value: State | None = None, *, what: str = "trainer") -> None:
        self.value: State = {} if value is None else value
        self._what = what

    def state_dict(self) -> State:
        """Return the text. ``StateError`` names the part of ``value`` that cannot be stored."""
        return {"text": value_text.dumps(self.value, what=self._what)}

    def load_state_dict(self, state: State) -> None:
        """Take ``value`` from a text. ``StateError`` if something else was saved."""
        value = value_text.loads(state["text"]) if isinstance(state, dict) and isinstance(state.get("text"), str) else None
        if not isinstance(value, dict):
            remedy = "restore a version of the same trainer, saved by this release"
            raise StateError("the version has no progress of a training here", subject=self._what, remedy=remedy)
        self.value = value

    def load_rank_states(self, states: Sequence[State], rank: int, world_size: int) -> None:
        """Take that of this rank from those of another number of ranks; a new rank takes that of rank 0."""
        if rank == 0 and any(state != states[0] for state in states):
            what = "%d ranks restore what %d ranks have saved: %s"
            lost = "the states of callbacks and data loaders of the other ranks are not restored"
            new = "new ranks get the states of callbacks and data loaders of rank 0"
            logger.warning(what, world_size, len(states), lost if world_size < len(states) else new)
        self.load_state_dict(states[rank if rank < len(states) else 0])

    def check(self) -> None:
        """Raise ``StateError`` for what a save would refuse."""
        self.state_dict()


def journal_options(journal: bool, durable_every: int) -> tuple[bool, int]:
    """Return a callback's options for the journal, which records the progress with each step. ``StateError`` if only the second
    one is given."""
    if durable_every and not journal:
        raise StateError("durable_every without a journal", remedy="pass journal=True")
    return journal, integer("durable_every", durable_every, least=0)
