"""The side of the process that commits: an epoch for each process and repository, and the step from parts to a version."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ... import __version__
from ...storage.clock import SYSTEM
from ...storage.committer import Committer
from ...storage.errors import SaveFailed
from ...storage.format import key_files
from ...storage.format.version_record import VersionRecord
from ...storage.repository import create_repository
from ...storage.retention.policy import Policy
from ...storage.version import Version
from ...workers.port import MODULUS
from ..housekeeping import Housekeeping
from .part import Part

_lock = threading.Lock()
_committers: dict[tuple[int, str], Committer] = {}  # by process, which may have been forked


def committer_of(uri: str) -> Committer:
    """This process's committer for a repository, which is made if there is none.

    One for all saves of the process: a save that took an epoch for itself would fence an asynchronous one still under way,
    and a process thought dead would take over again with its next save.
    """
    with _lock:
        here = os.getpid(), uri
        if here not in _committers:
            signer = key_files.signer()
            owner = f"direct-{platform.node()}-{SYSTEM.token()}"
            _committers[here] = Committer(create_repository(uri, signer=signer), owner, signer)
        return _committers[here]


class Committing:
    """One attempt to make a version. ``step``: None for one more than the newest version's."""

    def __init__(self, uri: str, step: int | None) -> None:
        self._committer = committer_of(uri)
        self.repository = self._committer.repository
        if step is None:
            latest = self.repository.latest()
            step = 0 if latest is None else latest.step + 1
        self.step = step
        with _lock:
            self.id, self.attempt = self._committer.reserve()

    def commit(
        self, parts: Sequence[Part], expected: int, metrics: Mapping[str, Any], writer: Mapping[str, str] | None = None
    ) -> Version:
        """Make the version. ``expected``: the sum of ``workers.port.coverage`` over all tensors, each of them whole.
        ``writer``: software to name beside raystow."""
        if (sum(part.covered for part in parts) - expected) % MODULUS:
            raise SaveFailed(
                "what the ranks have stored does not add up to whole tensors",
                subject=f"save of step {self.step}",
                remedy="save on every rank that holds a part of them",
            )
        record = VersionRecord(
            repository=self.repository.id,
            id=self.id,
            attempt=self.attempt,
            epoch=self._committer.epoch,
            step=self.step,
            created=SYSTEM.now(),
            world_size=len(parts),
            metrics=dict(metrics),
            writer={"raystow": __version__, "python": platform.python_version(), **(writer or {})},
            fragments=tuple(part.info for part in parts),
            packs=tuple(pack for part in parts for pack in part.packs),
        )
        return self._committer.commit(record)

    def keep_house(self, policy: Policy) -> None:
        """Drop what the policy does not keep."""
        Housekeeping(self._committer).run(policy)
