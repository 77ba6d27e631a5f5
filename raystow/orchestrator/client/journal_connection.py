"""Connects the journal of a rank: its recorder, the node worker that keeps entries, and the coordinator. Requires torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...storage.arguments import integer
from ...storage.stores.settings import place_of
from ...workers.protocol.messages import OpenJournal
from ..journal.port import JournalPort
from ..journal.recorder import JournalIdentity, StepRecorder
from ..journal.tracked_state import TrackedState
from .options import Memory, Replication
from .startup import Startup


def step_recorder(
    startup: Startup,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    options: tuple[Memory, Replication, float, int],
) -> StepRecorder:
    """Return what records the steps of a rank; see ``Checkpointer.journal``. Waits until the coordinator has started.
    ``options``: with the timeout of saves, and ``durable_every``."""
    memory, replication, timeout, durable_every = options
    durable_every = integer("durable_every", durable_every, least=0)
    repository, calls, member = startup.wait().repository, startup.port, startup.member
    who = JournalIdentity(startup.uri, repository, member.rank, member.world_size, member.incarnation, timeout)
    kept, place = (replication.replicas, memory.journal), place_of(startup.store)
    opening = OpenJournal(startup.uri, repository, member.rank, *kept, durable_every, place)
    port = JournalPort(opening, startup.node_address, settle=calls.ask, reading=calls.send)
    return StepRecorder(TrackedState(model, optimizers), port, who)
