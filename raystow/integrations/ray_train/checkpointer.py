"""``Checkpointer`` for training functions of Ray Train: reports every version to Train.

Only all ranks together can report, and a report cannot be withdrawn. So versions are reported after their commit: each ``save``
reports those committed since the save before, and ``close`` the rest. A failed save is never reported.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray.train
from ray.exceptions import RayError
from ray.train.collective import broadcast_from_rank_zero

from ...orchestrator.client import checkpointer
from ...orchestrator.client.pending import Pending
from ...orchestrator.client.save_settings import Values
from ...state.tree import State
from ...storage.errors import ClusterError, OutcomeUnknown, SaveFailed, StateError, Unsupported
from ...storage.format.root import Entry
from ...storage.object_store import ObjectStore
from ...storage.retention.policy import Policy
from ...storage.versions.version import Version
from ...storage.versions.version_selector import LATEST, VersionSelector
from .pointer import Identity, folder, identity, write
from .storage import repository_in, store_in
from .train_sync import TrainSync

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.storage import StorageContext

logger = logging.getLogger(__name__)

_QUEUE = 2  # pending reports; Train processes one every other second
_REPORT_TIMEOUT = 20.0  # seconds for Train to process the last reports


class Checkpointer(checkpointer.Checkpointer):
    """Save and restore one rank of a Ray Train run, and report every version to Train.

    Each version becomes a ``ray.train.Checkpoint`` with those metrics given to ``save`` that are JSON; ``version_of`` returns the
    version of a checkpoint. A version that Train drops by its ``CheckpointConfig`` is dropped from the repository; a version that
    Train keeps is pinned there, so that no other retention drops it.

    ``save``, ``restore``, ``report`` and ``close`` are barriers: every rank calls them in the same order. If
    a ``with`` block ends by an exception, ``close`` reports nothing, since other ranks may not call it.

    Args:
        uri: The repository. None: the folder ``raystow`` in the run's ``RunConfig(storage_path=, name=)``, reached with the
            endpoint, region and credentials of Train's file system.
        validation: Passed to ``ray.train.report`` with each version.
        options: The other options of ``raystow.Checkpointer``.

    Raises:
        StateError: The process is not a Ray Train worker; or ``uri`` is None, and Train's storage is neither a folder, S3 nor
            Google Cloud Storage, or is reached in a way that cannot be taken over.
        Unsupported: Train runs in local mode, or its version is too old.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        validation: bool | ray.train.ValidationTaskConfig = False,
        **options: Any,
    ) -> None:
        storage, run = _storage_and_run()
        self._filesystem = storage.storage_filesystem if uri is None else None
        if uri is None:
            uri = repository_in(storage.storage_filesystem, storage.experiment_fs_path)
        # The coordinator deletes dropped versions after an hour, but only if there is a policy.
        super().__init__(uri, **{"retention": Policy(), **options})
        self._storage, self._validation = storage, validation
        self._slots = threading.BoundedSemaphore(_QUEUE)
        self._run = run
        self._subscribers.concluded = self._wake

    @functools.cached_property
    def _sync(self) -> TrainSync | None:
        """Reports versions to Train, on rank 0."""
        if self.rank != 0:
            return None
        repository, storage = self._startup.repository(), self._storage

        def write_pointer(entry: Entry) -> None:
            write(repository, entry, storage.storage_filesystem, storage.build_checkpoint_path_from_name(folder(entry)))

        return TrainSync(repository, self._run, listed=_listed, write_pointer=write_pointer)

    def save(self, state: State, *, step: int, metrics: Values | None = None, cut: Values | None = None) -> Pending:
        """Start to save ``state``, then ``report`` the versions that earlier saves have become.

        Args:
            state: See ``raystow.Checkpointer.save``.
            step: The training step.
            metrics: Plain values by name; Train also scores versions by them.
            cut: See ``raystow.Checkpointer.save``.

        Returns:
            The save in flight.

        Raises:
            StateError: The state holds something that cannot be stored.
            SaveFailed: Earlier saves failed and ``on_failure`` asks to raise.
            OutcomeUnknown: The same, for a save that may or may not be a version.
        """
        if self._sync is not None and not self._sync.started:
            self._sync.collect()
        try:
            pending = super().save(state, step=step, metrics=metrics, cut=cut)
        except (SaveFailed, OutcomeUnknown):  # on this rank alone: the others report
            self.report()
            raise
        self.report()
        return pending

    def restore(self, into: State, version: VersionSelector = LATEST, **options: Any) -> Version | None:
        """Fill ``into`` from a version, then ``report`` versions that an earlier worker group could not report.

        The latest version is that of the repository, which Train may not know yet.

        Args:
            into: See ``raystow.Checkpointer.restore``.
            version: See ``raystow.Checkpointer.restore``. For a ``ray.train.Checkpoint``, pass its ``version_of``.
            options: The other options of that method.

        Returns:
            The version, or None if the latest one is asked for and there is none.

        Raises:
            StateError: Names, shapes or dtypes do not match, or ``version`` is invalid.
            NotFound: There is no such version.
            Damaged: The version is damaged, or no version is whole.
        """
        restored = super().restore(into, version, **options)
        if self._sync is not None:
            self._sync.collect()
            self._sync.wake()
        self.report()
        return restored

    def report(self) -> None:
        """Report the versions committed since the last call to Train. Takes some milliseconds.

        ``save`` calls this. Call it between saves that are far apart if ``validation`` should start earlier.
        """
        reports = self._sync.take_reports() if self._sync is not None else []
        if self.rank > 0:
            for _ in range(broadcast_from_rank_zero(0)):
                ray.train.report({}, checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC)
            return
        broadcast_from_rank_zero(len(reports))
        for name, metrics in reports:
            self._report(name, metrics)

    def close(self) -> None:
        """Wait for the saves in flight, report the last versions to Train, and drop the versions that Train drops for them.

        Raises:
            SaveFailed: See ``raystow.Checkpointer.close``. ``fit()`` fails then, unless Train starts the workers again.
            OutcomeUnknown: The same, for a save that may or may not be a version.
            Fenced: Another run has taken over the repository.
        """
        if not self._release():
            return
        if self._sync is not None:
            self._sync.collect()
        self.report()
        if self._sync is not None:
            self._sync.drop(_REPORT_TIMEOUT)
            self._sync.close()
        self.failures.check_last()  # not before ``report``: it is of this rank alone

    def __enter__(self) -> Checkpointer:
        return self

    def _report(self, name: str, metrics: Mapping[str, object]) -> None:
        """Report a version, whose pointer is in the folder ``name`` already. The empty upload makes Train process the report
        asynchronously."""
        if not (waited := self._slots.acquire(timeout=self._timeout)):
            logger.warning("Ray Train has processed no report for %.0f s", self._timeout)

        def upload(pointer: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            if waited:
                self._slots.release()
            return pointer

        ray.train.report(
            metrics,
            ray.train.Checkpoint(self._storage.build_checkpoint_path_from_name(name), self._storage.storage_filesystem),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=upload,
            validation=self._validation,
        )

    def _open(self, address: str) -> ObjectStore:
        return super()._open(address) if self._filesystem is None else store_in(self._filesystem, address)

    def _wake(self) -> None:
        if self._sync is not None:
            self._sync.wake()


def _storage_and_run() -> tuple[StorageContext, str]:
    """The storage of this worker's run, and the run's name."""
    _need("get_all_reported_checkpoints")
    remedy = "elsewhere, use raystow.Checkpointer"
    try:
        context = ray.train.get_context()
        return context.get_storage(), str(context.get_experiment_name())
    except NotImplementedError as error:
        raise Unsupported("Ray Train's local mode has no storage", remedy=remedy) from error
    except RuntimeError as error:
        raise StateError("this process is not a worker of Ray Train", remedy=remedy) from error


def _need(name: str) -> None:
    if not hasattr(ray.train, name):
        what = f"Ray Train has no {name} in Ray {ray.__version__}, or with RAY_TRAIN_V2_ENABLED=0"
        raise Unsupported(what, remedy="upgrade Ray (2.60 is tested), or use raystow.Checkpointer")


def _listed(timeout: float) -> set[Identity]:
    """The versions among the checkpoints that Train lists."""
    mode = ray.train.CheckpointConsistencyMode.COMMITTED
    try:
        reported = ray.train.get_all_reported_checkpoints(consistency_mode=mode, timeout_s=timeout)
    except RayError as error:
        raise ClusterError(f"does not list its checkpoints: {error}", subject="the controller of Ray Train") from error
    return {which for one in reported if (which := identity(one.checkpoint.path)) is not None}
