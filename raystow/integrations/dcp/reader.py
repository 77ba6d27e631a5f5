"""``Reader``: loads any version of a repository by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...orchestrator.argument_checks import address
from ...orchestrator.restore.fill import Fill
from ...orchestrator.restore.numbers import element
from ...orchestrator.restore.shared_containers import check_containers
from ...state.shards import Shard, shard_of
from ...state.tree import Leaf, is_tensor, show
from ...state.wrapper_tensors import unwrapped
from ...storage.arguments import integer
from ...storage.errors import NotARepository, RaystowError, StateError
from ...storage.format.manifest import Chunk
from ...storage.repository import Repository, open_repository
from ...storage.versions.version import Version
from ...storage.versions.version_selector import LATEST, VersionSelector
from .checkpoint_id import is_id, parse_id
from .checks import check_placed, is_elsewhere, is_wrapper, refuse_torch_files, refuse_wrappers
from .keys import path_of
from .version_metadata import UnreadMetadata, VersionMetadata
from .wrapper_targets import wrapper_targets

_WHAT = "state_dict"


class Reader(StorageReader):  # type: ignore[misc]  # torch is not typed here
    """Load a version by ``torch.distributed.checkpoint``. Make one on every rank.

    Each rank reads the whole manifest, and the chunks that overlap its own shards; every chunk is checked against its digests.
    ``load`` raises ``CheckpointException``; its ``failures`` hold the errors of raystow by rank.

    Args:
        uri: The repository.
        version: An id, the name of a pin, ``"step:60"`` (the newest version of that step), a ``Version``, or ``"latest"``. A
            ``checkpoint_id`` selects another one: see ``Writer``.
        cast: Convert tensors to the dtypes of the state. By default, another dtype is an error.
        trusted_keys: See ``raystow.open``.
        threads: Requests and decoding threads at a time. None: twice the cores, at most 16.

    Attributes:
        version: The version that is loaded.

    Raises:
        StateError: An argument is invalid.

    Example:
        >>> dcp.load(state, storage_reader=raystow.dcp.Reader("s3://bucket/run"))
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        version: VersionSelector = LATEST,
        *,
        cast: bool = False,
        trusted_keys: str | os.PathLike[str] | None = None,
        threads: int | None = None,
    ) -> None:
        self.uri, self._requested, self._trusted = address(uri), version, trusted_keys
        self._threads = None if threads is None else integer("threads", threads, least=1, instead="None")
        self._cast = cast
        self._named: str | None = None
        self._rank = 0
        self._repository: Repository | None = None
        self._metadata: VersionMetadata | None = None
        self.version: Version | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load; ``checkpoint_id`` may select the version."""
        found = None if checkpoint_id is None else parse_id(checkpoint_id)
        self._named = f"step:{found}" if isinstance(found, int) else found
        self._metadata = self.version = None

    def read_metadata(self) -> Metadata:
        """Return the manifest as DCP's metadata: all chunks of all tensors, and the keys of plain values.

        An error is raised when the metadata is first used.
        """
        try:
            self._repository = self._opened()
            self.version = self._repository.version(self._requested if self._named is None else self._named)
            self._metadata = VersionMetadata(self.version)
            return self._metadata.metadata()
        except RaystowError as error:
            return UnreadMetadata(error)

    def _opened(self) -> Repository:
        try:
            return open_repository(self.uri, trusted_keys=self._trusted)
        except NotARepository:
            refuse_torch_files(self.uri)
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Learn the rank, whose plain values are loaded. Raises what ``read_metadata`` found."""
        if isinstance(metadata, UnreadMetadata):
            raise metadata.error
        rank = kwargs.get("rank")  # DCP passes it only to a parameter with the name ``kwargs``
        self._rank = rank if isinstance(rank, int) else 0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the version that this rank has found to its plan."""
        assert self.version is not None
        plan.storage_data = (self.version.id, self.version.attempt)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise ``StateError`` if ranks found different versions, since one was committed meanwhile."""
        found = sorted({plan.storage_data for plan in plans})
        if len(found) > 1:
            what = f"ranks have found different newest versions: {', '.join(str(id) for id, _ in found)}"
            raise StateError(what, subject=self.uri, remedy=f"load again, or pass version={found[0][0]}")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and plain values of the plan.

        Raises ``StateError`` before anything is filled if a dtype differs, unless ``cast``, or if tensors share memory;
        ``Damaged`` if bytes do not match their digests.
        """
        assert self.version is not None
        assert self._repository is not None
        with self._repository.lease(self.version):
            fill = Fill({}, self.version.reader(threads=self._threads), what=_WHAT)
            keys = dict.fromkeys(item.dest_index.fqn for item in plan.items)
            wrappers = [key for key in keys if is_wrapper(planner, key)]
            for shard, chunks in wrapper_targets(self.version, planner, wrappers):
                fill.add(shard, chunks)
            nothing = {key for key in keys if is_elsewhere(planner, key)}
            others = [item for item in plan.items if item.dest_index.fqn not in nothing.union(wrappers)]
            items = [item for item in others if item.type is not LoadItemType.BYTE_IO]
            targets = [unwrapped(planner.resolve_tensor(item)).detach() for item in items]
            for item, target in zip(items, targets, strict=True):
                self._add_tensor(item, target, planner, fill)
            found = (self._value(item, planner, fill) for item in others if item.type is LoadItemType.BYTE_IO)
            values = dict(filter(None, found))
            _check_places(planner, values)
            list(fill.runs())  # checks all targets
            fill.run()
            for item, target in zip(items, targets, strict=True):
                planner.commit_tensor(item, target)
            for key, value in values.items():
                _put(planner, key, value)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    validate_checkpoint_id = staticmethod(is_id)

    def _add_tensor(self, item: ReadItem, target: torch.Tensor, planner: LoadPlanner, fill: Fill) -> None:
        assert self._metadata is not None
        check_placed(planner, item.dest_index.fqn)
        chunk, (offset, extent) = self._metadata.box(item)
        if 0 not in extent:
            shard = _shard(item.dest_index.fqn, target)
            self._add(replace(shard, shape=chunk.shape, offset=offset, extent=extent), [chunk], fill)

    def _value(self, item: ReadItem, planner: LoadPlanner, fill: Fill) -> tuple[str, object] | None:
        """The key and new value of a plain value or array; None if a tensor or array of the state is filled in place."""
        assert self._metadata is not None
        key = item.dest_index.fqn
        if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
            what = f"planner {type(planner).__name__} accepts values as pickles only, which raystow never reads"
            raise StateError(what, subject=key, remedy="use a planner that does not override load_bytes of DefaultLoadPlanner")
        if planner.flatten_state_dict and self._metadata.is_flattened(key):
            what = f"version {self.version.id if self.version else ''} has a dict or list under this name"
            raise StateError(what, subject=key, remedy="pass one with the same keys, or use flatten_state_dict=False")
        refuse_wrappers(planner, key)
        target = planner.state_dict.get(key)
        if not is_tensor(target) or isinstance(target, np.generic):
            return key, self._metadata.value(item.storage_index.fqn, self._rank)
        shard = _shard(key, target)
        if (chunks := self._metadata.array(key)) is not None:
            self._add(shard, chunks, fill)
        else:
            value = self._metadata.value(item.storage_index.fqn, self._rank)
            fill.add_number(shard, element(value, shard, show((key,), _WHAT), cast=self._cast))
        return None

    def _add(self, shard: Shard, chunks: list[Chunk], fill: Fill) -> None:
        saved = chunks[0]
        if shard.shape != saved.shape or (shard.dtype != saved.dtype and not self._cast):
            what = f"is {shard.dtype} {shard.shape}, but the version holds {saved.dtype} {saved.shape}"
            remedy = "" if shard.shape != saved.shape else "Reader(cast=True) converts"
            raise StateError(what, subject=show(shard.leaf.path, _WHAT), remedy=remedy)
        fill.add(shard, chunks)


def _shard(key: str, target: object) -> Shard:
    return shard_of(Leaf((key,), key, target, True), what=_WHAT)


def _check_places(planner: LoadPlanner, values: dict[str, object]) -> None:
    """``StateError`` if a container is at two places of the state, and its entries would get two values."""
    if isinstance(planner, DefaultLoadPlanner) and planner.flatten_state_dict:
        new = {path_of(key, planner.mappings): value for key, value in values.items()}
        check_containers(planner.original_state_dict, new, _WHAT)


def _put(planner: DefaultLoadPlanner, key: str, value: object) -> None:
    """Store a plain value in the state, where DCP would store the value that it unpickles."""
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], value)
    else:  # state_dict is another dict than the caller's by default: flatten_sharded_tensors copies it
        planner.state_dict[key] = planner.original_state_dict[key] = value
