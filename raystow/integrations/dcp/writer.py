"""``Writer``: saves the state of a ``torch.distributed.checkpoint`` call as a version."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ...orchestrator import argument_checks
from ...orchestrator.coordinator.housekeeping import kept_by_a_run
from ...orchestrator.standalone.commit import StandaloneCommit
from ...orchestrator.standalone.writer import StandaloneWriter, StoredPart, cores, merged, value_of
from ...state.box import Box, Boxes
from ...state.coverage import coverage, total
from ...state.lossy.tensor_values import dtype_name
from ...state.shards import Shard, shard_of
from ...state.tree import Leaf, boxes, flatten
from ...state.wrapper_tensors import unwrapped
from ...storage.arguments import integer
from ...storage.errors import NotARepository, SaveFailed, StateError
from ...storage.format.manifest import Value
from ...storage.repository import open_repository
from ...storage.retention.policy import Policy
from ...storage.runtime.clock import SYSTEM
from ...storage.stores import open_store
from ...storage.versions.version import Version
from ...workers.protocol.messages import Ticket
from .checkpoint_id import is_id, parse_id
from .checks import check_placed, is_wrapper, refuse_torch_files
from .keys import path_of

_WHAT = "state_dict"
_MEMORY = 512 << 20


@dataclass(frozen=True)
class _Written:
    """Sent to the coordinator rank by each. ``part``: None of the coordinator rank, whose fragment is stored last. ``values``:
    the plain values of the rank, which the coordinator rank stores: DCP assigns each key to one rank, whatever others have.
    ``wrappers``: the keys of tensors that consist of others; ``expected``: the coverage of those."""

    part: StoredPart | None
    values: tuple[Value, ...]
    wrappers: tuple[str, ...]
    expected: int


class Writer(StorageWriter):  # type: ignore[misc]  # torch is not typed here
    """Save a ``torch.distributed.checkpoint`` state as a version. Make one for each save, on every rank.

    ``save`` raises ``CheckpointException`` on every rank if one rank fails; its ``failures`` hold the errors of raystow by rank:
    ``StateError`` names the key of a value that cannot be stored, ``Fenced`` says that another writer took the repository over.

    Args:
        uri: The repository; it is created if it does not exist.
        step: The training step. None: that of ``checkpoint_id``, or one more than the newest version's. The last part of a
            ``checkpoint_id`` is a step if it is ``step-7``, ``step_7``, ``checkpoint-7`` or ``epoch=1-step=7.ckpt``. Any other is
            a name: the version is pinned under it, and ``version=`` accepts it.
        metrics: Plain values by name; those of the coordinator rank are stored.
        retention: The versions to keep; applied after the save.
        timeout: Seconds that the upload of a rank may take.
        memory: Bytes of chunks that each rank encodes or uploads at a time.
        threads: Threads that encode on each rank. None: the rank's share of the machine's cores.

    Attributes:
        version: The version that was saved, on the coordinator rank; None if there is none yet. After a save by a process-based
            executor, it is looked up in the repository.

    Raises:
        StateError: An argument is invalid.

    Example:
        >>> dcp.save(state, storage_writer=raystow.dcp.Writer("s3://bucket/run", step=100))
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        step: int | None = None,
        metrics: Mapping[str, object] | None = None,
        retention: Policy | None = None,
        timeout: float = 600.0,
        memory: int = _MEMORY,
        threads: int | None = None,
    ) -> None:
        self.uri, self.step = argument_checks.address(uri), None if step is None else integer("step", step, least=0)
        self._name: str | None = None
        self._attempt: str | None = None  # of the copy in another process
        self._version: Version | None = None
        self._metrics, self._retention = argument_checks.metrics_of(metrics), kept_by_a_run(retention, self.uri)
        self._timeout = argument_checks.positive("timeout", timeout, most=argument_checks.LONGEST)
        self._memory = argument_checks.memory_of_a_rank(memory, least=1)  # a larger chunk is processed alone
        self._threads = None if threads is None else integer("threads", threads, least=1, instead="None")
        self._committing: StandaloneCommit | None = None
        self._storing: StandaloneWriter | None = None  # on the coordinator rank
        self._values: tuple[MetadataIndex, ...] = ()  # of this rank

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save; ``checkpoint_id`` is its step or its name."""
        found = None if checkpoint_id is None else parse_id(checkpoint_id)
        if isinstance(found, int):
            self.step = found
        self._name = found if isinstance(found, str) else None
        self._committing = self._storing = self._version = None

    @property
    def version(self) -> Version | None:
        """The version that was saved; None if there is none yet, and on ranks that do not commit."""
        if self._version is None and self._attempt is not None:
            with contextlib.suppress(NotARepository):  # nothing was saved yet
                for version in open_repository(self.uri).versions():
                    if self._attempt in (version.attempt, version.entry.saved):
                        self._version = version
        return self._version

    def __getstate__(self) -> dict[str, object]:
        """Choose the attempt of the copy: a process-based executor commits with the copy, and this Writer finds its version."""
        self._attempt, self._version = SYSTEM.token(), None
        return {**self.__dict__, "_committing": None, "_storing": None}

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Refuse to save without the other ranks."""
        if not kwargs.get("use_collectives", True):  # DCP passes it only to a parameter with the name ``kwargs``
            raise StateError("a commit needs all ranks", subject=self.uri, remedy="remove use_collectives=False")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Note the values that this rank has, before DCP assigns each to one rank."""
        self._values = tuple(item.index for item in _of_values(plan))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open an attempt on the coordinator rank, and send it to each rank with its plan."""
        try:
            open_repository(self.uri)
        except NotARepository:
            refuse_torch_files(self.uri)
        chosen, self._attempt = self._attempt, None
        self._committing = attempt = StandaloneCommit(self.uri, self.step, chosen)
        tickets = [attempt.ticket(rank, self._timeout) for rank in range(len(plans))]
        return [replace(plan, storage_data=(attempt.repository.id, ticket)) for plan, ticket in zip(plans, tickets, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Code and upload this rank's part. Values that cannot be stored are refused before the first byte is written."""
        _check_planner(planner)
        repository: str
        ticket: Ticket
        repository, ticket = plan.storage_data
        if open_repository(self.uri).id != repository:
            what = "this rank sees another folder there than the rank that commits"
            raise SaveFailed(what, subject=self.uri, remedy="use one all nodes share")
        rank, mappings = ticket.node, getattr(planner, "mappings", {})
        leaves = [(index.fqn, leaf) for index in self._values for leaf in _leaves(index, planner, mappings)]
        assigned = {item.index.fqn for item in _of_values(plan)}
        within = [_whole(leaf) for key, leaf in leaves if leaf.is_tensor and key in assigned]
        items = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        wrappers = tuple(key for key in dict.fromkeys(item.index.fqn for item in items) if is_wrapper(planner, key))
        tensors = [item for item in items if item.index.fqn not in wrappers]
        parts = [leaf for key in wrappers for leaf in _parts(key, planner, mappings)]
        inner = [_named(box) for leaf in parts if leaf.is_tensor for box in boxes(leaf, _WHAT)]
        for item in tensors:
            _shard(item, planner, mappings)  # raises before anything is written
        plain = (leaf for leaf in (*(leaf for _, leaf in leaves), *parts) if not leaf.is_tensor)
        values = tuple(value_of(leaf, rank) for leaf in plain)
        storing = StandaloneWriter(open_store(self.uri), ticket, memory=self._memory, threads=self._threads or cores())
        with storing.under_way():
            for shard in within:
                storing.add(shard, counted=False)
            for shard in inner:
                _wait(shard)
                storing.add(shard)
            for item in tensors:
                shard = _shard(item, planner, mappings)
                _wait(shard)
                storing.add(shard)
            storing.seal()
            part = None if self._committing is not None else storing.finish([])
        self._storing = storing if part is None else None
        expected = total(coverage(s.leaf.name, s.dtype, s.shape) for s in inner if not any(s.offset) and 0 not in s.extent)
        written = _Written(part, values, wrappers, expected)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(f"rank {rank}"), storing.nbytes, written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the version, on the coordinator rank."""
        if self._committing is None or self._storing is None:
            raise SaveFailed("DCP has planned nothing with this Writer", subject=self.uri)
        written: list[_Written] = [result.storage_data for of_rank in results for result in of_rank]
        own = self._storing.finish(merged(value for one in written for value in one.values))
        parts, self._storing = [one.part or own for one in written], None
        tensors = _expected(metadata, {key for one in written for key in one.wrappers})
        expected = total((tensors, *(one.expected for one in written)))
        self._version = self._committing.commit(parts, expected, self._metrics, {"torch": str(torch.__version__)})
        if self._name is not None:
            open_repository(self.uri).pin(self._version, self._name)
        if self._retention is not None:
            self._committing.apply_retention(self._retention)

    validate_checkpoint_id = staticmethod(is_id)


def _of_values(plan: SavePlan) -> list[WriteItem]:
    return [item for item in plan.items if item.type is WriteItemType.BYTE_IO]


def _check_planner(planner: SavePlanner) -> None:
    """Raise ``StateError`` for planners that provide values as pickles only, or that reuse an earlier plan."""
    if not isinstance(planner, DefaultSavePlanner):
        what = f"planner {type(planner).__name__} provides values as pickles, which are not stored"
        raise StateError(what, remedy="derive it from DefaultSavePlanner, whose lookup_object returns the values")
    if getattr(planner, "_enable_plan_caching", False):
        raise StateError("plans cannot be cached, since each names its own attempt", remedy="remove enable_plan_caching=True")


def _leaves(index: MetadataIndex, planner: DefaultSavePlanner, mappings: Mapping[str, Sequence[str | int]]) -> list[Leaf]:
    """The leaves of a value that is not a tensor; raises ``StateError`` naming the key of a value that is not plain."""
    key, path = index.fqn, path_of(index.fqn, mappings)
    found = flatten({key: planner.lookup_object(index)}, what=_WHAT)
    return [leaf._replace(path=path + leaf.path[1:]) for leaf in found]


def _whole(leaf: Leaf) -> Shard:
    """An array, or a tensor within a tuple or an unflattened dict, which DCP treats as a value."""
    shard = _named(leaf)
    if shard.holders:
        remedy = "use dicts and lists, and flatten_state_dict=True"
        raise StateError("a DTensor in a value that DCP does not flatten", subject=leaf.name, remedy=remedy)
    return shard


def _named(leaf: Leaf) -> Shard:
    """The shard of a leaf; errors name it by its key, as DCP does."""
    return replace(shard_of(leaf._replace(path=(leaf.name,)), what=_WHAT), leaf=leaf)


def _shard(item: WriteItem, planner: SavePlanner, mappings: Mapping[str, Sequence[str | int]]) -> Shard:
    """The box of a tensor that an item describes."""
    key, data = item.index.fqn, item.tensor_data
    check_placed(planner, key)
    leaf = planner.state_dict.get(key)
    tensor = leaf.__get_tensor_shard__(item.index) if isinstance(leaf, Box | Boxes) else planner.resolve_data(item)
    local = _named(Leaf(path_of(key, mappings), key, unwrapped(tensor).detach(), True))
    if local.shape != tuple(data.chunk.sizes) or local.dtype != dtype_name(data.properties.dtype):
        what = f"{local.dtype} {local.shape} where the plan says {dtype_name(data.properties.dtype)} {tuple(data.chunk.sizes)}"
        raise StateError(what, subject=f'{_WHAT}["{key}"]', remedy="fix the planner: its plan and data must agree")
    return replace(local, shape=tuple(data.size), offset=tuple(data.chunk.offsets))


def _parts(key: str, planner: DefaultSavePlanner, mappings: Mapping[str, Sequence[str | int]]) -> list[Leaf]:
    """The leaves of a tensor that consists of others."""
    path = path_of(key, mappings)
    found = flatten({key: planner.state_dict[key]}, what=_WHAT)
    return [leaf._replace(path=path + leaf.path[1:]) for leaf in found]


def _wait(shard: Shard) -> None:
    """Wait until a tensor of a device is computed."""
    if shard.device is not None:
        torch.cuda.current_stream(shard.device).synchronize()


def _expected(metadata: Metadata, but: Collection[str]) -> int:
    tensors = {
        key: data
        for key, data in metadata.state_dict_metadata.items()
        if isinstance(data, TensorStorageMetadata) and key not in but
    }
    return total(coverage(k, dtype_name(d.properties.dtype), tuple(d.size)) for k, d in tensors.items())
