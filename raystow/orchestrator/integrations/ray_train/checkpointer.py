"""``Checkpointer``: as raystow's, in a training function of Ray Train, and Train knows of every version.

Train can be told only by all ranks together, and a report cannot be taken back. So nothing is reported before it is committed:
each ``save`` tells of the versions committed since the one before, ``close`` of the rest. A save that fails is never heard of.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import ray.train
from ray.exceptions import RayError
from ray.train.collective import broadcast_from_rank_zero

from ....storage.errors import ClusterError, RaystowError, StateError, Unsupported
from ....storage.format import key_files
from ....storage.format.root import Entry
from ....storage.repository import Repository
from ....storage.retention.policy import Policy
from ....storage.version import Version
from ... import client
from ...pending import Pending
from .ledger import Ledger, News
from .pointer import Identity, folder, identity, write

logger = logging.getLogger(__name__)

_SCHEMES = {"local": "", "s3": "s3://"}
_QUEUE = 2  # reports that Train may not have taken yet; it takes one every other second
_TAKEN = 20.0  # seconds in which it should have taken the last ones


class Checkpointer(client.Checkpointer):
    """For each worker of Ray Train. Like ``raystow.Checkpointer``, but that Train is told of every version.

    ``uri``: the repository; by default ``raystow`` in the run's folder, which ``RunConfig(storage_path=, name=)`` says. Rank and
    world size are the worker's. ``validation``: as ``ray.train.report``'s, for each version. All other arguments are those of
    ``raystow.Checkpointer``.

    Each version becomes a ``ray.train.Checkpoint`` with the metrics given to ``save`` (those that JSON has): ``version_of`` tells
    which version it is. What Train drops by its ``CheckpointConfig`` is dropped from the repository; what it keeps is pinned
    there, so that no other retention takes it.

    ``save``, ``restore_latest``, ``report``, ``preempted`` and ``close`` are barriers of Train's: every rank calls them in
    the same order. In a ``with`` block, an exception leaves out the one of ``close``: the other ranks may not come.

    ``StateError`` outside of a worker, or if Train's storage is none that raystow has and there is no ``uri``; ``Unsupported`` in
    Train's local mode and for a Ray Train that is too old.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        validation: bool | ray.train.ValidationTaskConfig = False,
        **options: Any,
    ) -> None:
        storage, run = _place()
        if uri is None:
            uri = _repository_in(storage)
        # What Train drops is deleted an hour later, by the coordinator: it looks for that only if there is a policy.
        super().__init__(uri, **{"retention": Policy(), **options})
        self._storage, self._validation = storage, validation
        self._room = threading.BoundedSemaphore(_QUEUE)
        self._notice: Any = None
        self._ledger: Ledger | None = None
        if self.rank == 0:
            repository = Repository(self._store, self._repository_id, trust=key_files.trust(), signed_by=self._signed_by)

            def point(entry: Entry) -> None:
                write(repository, entry, storage.storage_filesystem, storage.build_checkpoint_path_from_name(folder(entry)))

            self._ledger = Ledger(repository, run, listed=_listed, point=point)

    def save(self, state: dict[str, Any], *, step: int, metrics: dict[str, Any] | None = None) -> Pending:
        """As ``raystow.Checkpointer.save``; then ``report`` what earlier saves have become. ``metrics``: also for Train, which
        scores by them."""
        if self._ledger is not None and not self._ledger.begun:
            self._ledger.look()
        pending = super().save(state, step=step, metrics=metrics)
        self.report()
        return pending

    def restore_latest(self, into: dict[str, Any], **options: Any) -> Version | None:
        """As ``raystow.Checkpointer.restore_latest``; then ``report`` what a worker group that died had no time to.

        The repository says what is newest: Train's view may be older."""
        version = super().restore_latest(into, **options)
        if self._ledger is not None:
            self._ledger.look()
            self._ledger.wake()
        self.report()
        return version

    def report(self) -> None:
        """Tell Train of the versions committed since the last call, if there are any. Some milliseconds: worth a call between two
        saves that are far apart, for those who wait for ``validation``."""
        news = self._ledger.take() if self._ledger is not None else []
        if self.rank > 0:
            for _ in range(broadcast_from_rank_zero(0)):
                ray.train.report({}, checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC)
            return
        broadcast_from_rank_zero(len(news))
        for version in news:
            self._tell(version)

    def preempted(self) -> bool:
        """Whether one of the run's nodes is to be taken away, said once for each notice: the time to ``save``.

        Takes some milliseconds: if steps are short, ask at every tenth. ``ray.train.get_preemption_info()`` says which node it
        is, and when.
        """
        _need("get_preemption_info")
        notice = ray.train.get_preemption_info()
        news = notice is not None and notice != self._notice
        self._notice = notice
        return news

    def close(self) -> None:
        """As ``raystow.Checkpointer.close``; then Train is told of the last versions, and what it drops for them is dropped."""
        super().close()
        if self._ledger is not None:
            self._ledger.look()
        self.report()
        if self._ledger is not None:
            self._ledger.tidy(_TAKEN)
            self._ledger.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            super().close()

    def _tell(self, version: News) -> None:
        """The pointer lies in its place, so there is nothing to upload; but only an upload lets Train take its time."""
        if not (waited := self._room.acquire(timeout=self._timeout)):
            logger.warning("Ray Train has taken no report for %.0f s", self._timeout)

        def upload(pointer: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            if waited:
                self._room.release()
            return pointer

        ray.train.report(
            version.metrics,
            ray.train.Checkpoint(self._storage.build_checkpoint_path_from_name(version.folder), self._storage.storage_filesystem),
            checkpoint_dir_name=version.folder,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=upload,
            validation=self._validation,
        )

    def _conclude(self, pending: Pending, outcome: Version | RaystowError) -> None:
        super()._conclude(pending, outcome)
        if self._ledger is not None:
            self._ledger.wake()


def _place() -> tuple[Any, str]:
    """Where Train stores the run of this worker, and the run's name."""
    _need("get_all_reported_checkpoints")
    remedy = "elsewhere, use raystow.Checkpointer"
    try:
        context = ray.train.get_context()
        return context.get_storage(), str(context.get_experiment_name())
    except NotImplementedError as error:
        raise Unsupported("Ray Train's local mode has no storage", remedy=remedy) from error
    except RuntimeError as error:
        raise StateError("this is no worker of Ray Train", remedy=remedy) from error


def _need(name: str) -> None:
    if not hasattr(ray.train, name):
        what = f"Ray Train has no {name} in Ray {ray.__version__}, or with RAY_TRAIN_V2_ENABLED=0"
        raise Unsupported(what, remedy="upgrade Ray (this was tried with 2.60), or use raystow.Checkpointer")


def _repository_in(storage: Any) -> str:
    kind = storage.storage_filesystem.type_name
    if kind not in _SCHEMES:
        what = f"raystow has no store for a file system of the kind {kind!r}"
        raise StateError(what, subject="RunConfig(storage_path=)", remedy="pass uri=: pointers alone will be in Train's storage")
    return f"{_SCHEMES[kind]}{storage.experiment_fs_path}/raystow"


def _listed(patience: float) -> set[Identity]:
    """The versions among the checkpoints that Train lists; see ``Listing``."""
    mode = ray.train.CheckpointConsistencyMode.COMMITTED
    try:
        reported = ray.train.get_all_reported_checkpoints(consistency_mode=mode, timeout_s=patience)
    except RayError as error:
        raise ClusterError(f"does not say what it lists: {error}", subject="the controller of Ray Train") from error
    return {which for one in reported if (which := identity(one.checkpoint.path)) is not None}
