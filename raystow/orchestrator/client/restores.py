"""The restores of one rank, which its Checkpointer makes together with the other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from ...state.objects import ObjectTree
from ...state.tree import State
from ...storage.repository import Repository
from ...storage.runtime import spans
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.metrics import RESTORE, record
from ...storage.versions.version import Version
from ...workers.protocol.messages import RestoreVote
from ..restore.agreed import restore_agreed
from ..restore.agreement import ClusterAgreement
from ..restore.fresh_start import FreshStart
from ..restore.name_match import names_digest
from ..restore.planner import RestoreOptions
from .replica_check import check_replicas
from .startup import Startup


class Restores:
    """Restores in turn. ``timeout``: seconds to wait for ranks that do not read on.

    Attributes:
        fresh: The last restore of rank 0, if it has found no version and no save has been compared with it.
        past: See ``RankSaveRequest``.
    """

    fresh: FreshStart | None

    def __init__(self, startup: Startup, timeout: float) -> None:
        self._startup, self._timeout, self._numbers = startup, timeout, itertools.count(1)
        self.fresh, self.past = None, ""

    def compare(self, into: State) -> None:
        """Compare what all ranks hold after a restore; see ``check_replicas``."""
        number, member = next(self._numbers), self._startup.member
        check_replicas(into, member, self._startup.port, number=number, timeout=self._timeout)

    def run(
        self,
        repository: Repository,
        into: State,
        options: RestoreOptions,
        saving: Mapping[int, int],
        *,
        asked: str,
        allow_uncommitted: bool,
        progress: Callable[[int], None] | None,
    ) -> Version | None:
        """Fill ``into`` from the version that is ``asked`` for; see ``Checkpointer.restore``. ``saving``: see ``RestoreVote``."""
        begun, member, objects = SYSTEM.monotonic(), self._startup.member, ObjectTree(into, what="into")
        tree = objects.into()
        vote = RestoreVote(
            *(member.rank, member.world_size, member.incarnation, next(self._numbers), self._timeout),
            allow_uncommitted=allow_uncommitted,
            version=asked,
            names=names_digest(tree) if options.world_size > 1 else 0,
            trace=spans.here(),
            parts=",".join(options.parts),
            saving=tuple(saving.items()),
        )
        here, address = self._startup.connection.node, self._startup.node_address
        agreement = ClusterAgreement(repository, self._startup.port, vote, self._numbers, address, here=here)
        with objects.named():
            restored = restore_agreed(repository, tree, agreement, options, progress=progress)
            self.past = agreement.past
            self.fresh = FreshStart.of(tree, options.names, cast=options.cast) if restored is None and options.rank == 0 else None
        if restored is not None:
            objects.load(options.rank, options.world_size)
            record(RESTORE, SYSTEM.monotonic() - begun, repository=repository.uri)
        return restored
