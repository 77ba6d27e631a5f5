"""``Reader``: loads any version of a repository by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
from collections import defaultdict

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ....storage.arguments import integer
from ....storage.errors import NotARepository, RaystowError, StateError
from ....storage.format.boxes import Box
from ....storage.format.manifest import Chunk
from ....storage.reader import PackReader, Request
from ....storage.repository import Repository, open_repository
from ....storage.version import Version
from ....storage.version_selector import LATEST, VersionSelector
from ...argument_checks import address
from ...restore.fill import fill_on_gpu
from ...save.shards import bits
from .checkpoint_id import is_id, parse_id
from .checks import check_placed, refuse_torch_files
from .version_metadata import UnreadMetadata, VersionMetadata

_AT_ONCE = 64  # boxes that are converted or copied to another device together


class Reader(StorageReader):  # type: ignore[misc]  # torch is not typed here
    """Load a version by ``torch.distributed.checkpoint``. Make one on every rank.

    Each rank reads the whole manifest, and the chunks that overlap its own shards; every chunk is checked against its digests.
    ``load`` raises ``CheckpointException``; its ``failures`` hold the errors of raystow by rank.

    Args:
        uri: The repository.
        version: An id, the name of a pin, ``"step:60"`` (the newest version of that step), a ``Version``, or ``"latest"``. A
            ``checkpoint_id`` selects another one: see ``Writer``.
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
        trusted_keys: str | os.PathLike[str] | None = None,
        threads: int | None = None,
    ) -> None:
        self.uri, self._requested, self._trusted = address(uri), version, trusted_keys
        self._threads = None if threads is None else integer("threads", threads, least=1, instead="None")
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
        """Fill the tensors and plain values of the plan. Raises ``Damaged`` if bytes do not match their digests."""
        assert self.version is not None
        assert self._repository is not None
        with self._repository.lease(self.version):
            self._fill([item for item in plan.items if item.type is not LoadItemType.BYTE_IO], planner)
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    self._put(item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    validate_checkpoint_id = staticmethod(is_id)

    def _fill(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self.version is not None
        assert self._metadata is not None
        in_memory: list[Request] = []
        on_gpu: dict[int, list[Request]] = defaultdict(list)
        indirect: list[tuple[Chunk, Box, torch.Tensor]] = []
        for key in {item.dest_index.fqn for item in items}:
            check_placed(planner, key)
        targets = [planner.resolve_tensor(item).detach() for item in items]
        for item, target in zip(items, targets, strict=True):
            chunk, box = self._metadata.box(item)
            if 0 in box[1]:
                continue
            same = str(target.dtype) == f"torch.{chunk.dtype}" and not target.is_conj() and not target.is_neg()
            if same and target.device.type in ("cpu", "cuda"):
                request = Request(chunk.name, [chunk], box, bits(target))
                (in_memory if target.device.type == "cpu" else on_gpu[target.device.index]).append(request)
            else:
                indirect.append((chunk, box, target))
        reader = self.version.reader(threads=self._threads)
        reader.fill(in_memory)
        for device, requests in on_gpu.items():
            fill_on_gpu(reader, device, requests, reader.runs(requests), lambda nbytes: None)
        for start in range(0, len(indirect), _AT_ONCE):
            _convert(reader, indirect[start : start + _AT_ONCE])
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    def _put(self, item: ReadItem, planner: LoadPlanner) -> None:
        """Store a plain value in the state, where DCP would store the value that it unpickles."""
        assert self._metadata is not None
        key = item.dest_index.fqn
        if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
            what = f"planner {type(planner).__name__} accepts values as pickles only, which raystow never reads"
            raise StateError(what, subject=key, remedy="use a planner that does not override load_bytes of DefaultLoadPlanner")
        if planner.flatten_state_dict and self._metadata.is_flattened(key):
            what = f"version {self.version.id if self.version else ''} has a dict or list under this name"
            raise StateError(what, subject=key, remedy="pass one with the same keys, or use flatten_state_dict=False")
        value = self._metadata.value(item.storage_index.fqn, self._rank)
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[key], value)
        else:  # state_dict is another dict than the caller's by default: flatten_sharded_tensors copies it
            planner.state_dict[key] = planner.original_state_dict[key] = value


def _convert(reader: PackReader, boxes: list[tuple[Chunk, Box, torch.Tensor]]) -> None:
    """Read boxes into host memory and copy them to tensors of other dtypes, as DCP does, or on other devices."""
    staged = [torch.empty(box[1], dtype=getattr(torch, chunk.dtype)) for chunk, box, _ in boxes]
    reader.fill([Request(chunk.name, [chunk], box, bits(raw)) for (chunk, box, _), raw in zip(boxes, staged, strict=True)])
    for (_, _, target), raw in zip(boxes, staged, strict=True):
        target.copy_(raw)
