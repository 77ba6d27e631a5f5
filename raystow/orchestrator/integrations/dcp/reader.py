"""``Reader``: loads a version of a raystow repository as DCP loads, whoever wrote it."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ....storage.arguments import integer
from ....storage.errors import StateError
from ....storage.reader import Reader as PackReader
from ....storage.reader import Request
from ....storage.repository import Repository, open_repository
from ....storage.version import Version
from ...arguments import address
from ...restore import fill_on_gpu
from ...shards import bits
from .catalogue import Catalogue
from .keys import names_step, step_of
from .placing import check_placed

_AT_ONCE = 64  # boxes that are converted or copied to another device together


class Reader(StorageReader):  # type: ignore[misc]  # torch is not typed here
    """For ``dcp.load(state, storage_reader=Reader(uri))``, on every rank.

    ``version``: "latest", or an id as ``raystow ls`` shows it. A ``checkpoint_id`` that ends in a number asks for the newest
    version of that step instead. ``trusted_keys``: see ``raystow.open``. ``threads``: requests and decodings at a time.

    Each rank reads the whole manifest, and of the packs the chunks that overlap its own shards. Every chunk is held against its
    digests. ``load`` raises ``CheckpointException``; its ``failures`` hold the ``RaystowError``s by rank.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        version: int | str = "latest",
        *,
        trusted_keys: str | os.PathLike[str] | None = None,
        threads: int | None = None,
    ) -> None:
        if version != "latest" and type(version) is not int:
            raise StateError(f"version {version!r} is neither 'latest' nor an id", subject=address(uri))
        self.uri, self._wanted, self._trusted = address(uri), version, trusted_keys
        self._threads = None if threads is None else integer("threads", threads, least=1, instead="None")
        self._step: int | None = None
        self._rank = 0
        self._repository: Repository | None = None
        self._catalogue: Catalogue | None = None
        self.version: Version | None = None
        """What is loaded; None before."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins; ``checkpoint_id`` may name the step."""
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)
        self._catalogue = self.version = None

    def read_metadata(self) -> Metadata:
        """The version's manifest, as DCP describes checkpoints: every chunk of every tensor, and the keys of plain values."""
        self._repository = open_repository(self.uri, trusted_keys=self._trusted)
        self.version = self._choose(self._repository)
        self._catalogue = Catalogue(self.version)
        return self._catalogue.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank, whose plain values are wanted."""
        self._rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which version this rank has found."""
        assert self.version is not None
        plan.storage_data = (self.version.id, self.version.attempt)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """``StateError`` if one was committed between the looks of two ranks."""
        found = sorted({plan.storage_data for plan in plans})
        if len(found) > 1:
            what = f"ranks have found different newest versions: {', '.join(str(id) for id, _ in found)}"
            raise StateError(what, subject=self.uri, remedy=f"load again, or pass version={found[0][0]}")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, and put its plain values in. Raises ``Damaged`` for what is not as it was written."""
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

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return names_step(checkpoint_id)

    def _choose(self, repository: Repository) -> Version:
        if type(self._wanted) is int:
            return repository.version(self._wanted)
        found = [version for version in repository.versions() if self._step in (None, version.step)]
        if not found:
            what = "holds no version" + ("" if self._step is None else f" of step {self._step}")
            raise StateError(what, subject=self.uri, remedy="`raystow ls` lists what there is")
        return found[-1]

    def _fill(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self.version is not None
        assert self._catalogue is not None
        in_memory: list[Request] = []
        on_gpu: dict[int, list[Request]] = defaultdict(list)
        indirect: list[tuple[Any, Any]] = []
        targets = []
        for key in {item.dest_index.fqn for item in items}:
            check_placed(planner, key)
        for item in items:
            target = planner.resolve_tensor(item).detach()
            targets.append((item, target))
            chunk, box = self._catalogue.box(item)
            if 0 in box[1]:
                continue
            same = str(target.dtype) == f"torch.{chunk.dtype}" and not target.is_conj() and not target.is_neg()
            if same and target.device.type in ("cpu", "cuda"):
                request = Request(chunk.name, [chunk], box, bits(target))
                (in_memory if target.device.type == "cpu" else on_gpu[target.device.index]).append(request)
            else:
                indirect.append(((chunk, box), target))
        reader = self.version.reader(threads=self._threads)
        reader.fill(in_memory)
        for device, requests in on_gpu.items():
            fill_on_gpu(reader, device, requests, reader.runs(requests), lambda nbytes: None)
        for start in range(0, len(indirect), _AT_ONCE):
            _convert(reader, indirect[start : start + _AT_ONCE])
        for item, target in targets:
            planner.commit_tensor(item, target)

    def _put(self, item: ReadItem, planner: LoadPlanner) -> None:
        """Put a plain value where DCP would put what it has unpickled."""
        assert self._catalogue is not None
        key = item.dest_index.fqn
        if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
            what = f"planner {type(planner).__name__} takes values as pickles only, and none are read"
            raise StateError(what, subject=key, remedy="use one that leaves load_bytes of DefaultLoadPlanner as it is")
        value = self._catalogue.value(item.storage_index.fqn, self._rank)
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[key], value)
        else:
            planner.state_dict[key] = value


def _convert(reader: PackReader, boxes: list[tuple[Any, Any]]) -> None:
    """Read boxes into host memory, and copy them from there: to other dtypes, as DCP does, and other devices."""
    staged = [torch.empty(box[1], dtype=getattr(torch, chunk.dtype)) for (chunk, box), _ in boxes]
    requests = [Request(chunk.name, [chunk], box, bits(raw)) for ((chunk, box), _), raw in zip(boxes, staged, strict=True)]
    reader.fill(requests)
    for (_, target), raw in zip(boxes, staged, strict=True):
        target.copy_(raw)
