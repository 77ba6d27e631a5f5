"""Takes the digests that a rank compares with other ranks, while a save reads its tensors."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...state.planner import SavePlan
from ...state.replica_digests import range_digest
from ...state.replica_groups import ReplicaGroup, ReplicaRange, ValueGroup
from ...storage.errors import Unsupported
from ..protocol.messages import DescribeReplicas

if TYPE_CHECKING:
    from ..gpu.replica_ranges import DeviceRanges

logger = logging.getLogger(__name__)

_Numbers = npt.NDArray[np.uint64]
_DESCRIBED = 4096  # groups that the node worker may remember


class ReplicaDigester:
    """Belongs to the staging thread. What the kernels of a GPU need is kept as long as the ranges are the same."""

    def __init__(self) -> None:
        self._described: set[int] = set()  # the groups that the node worker knows
        self._devices: dict[int, DeviceRanges] = {}
        self._refused = False  # by a GPU or its software, which is logged once

    def begin(self, plan: SavePlan) -> ReplicaDigests:
        """Begin to take the digests of a save on its GPUs."""
        groups, values = plan.compared
        ranges = [one for group in groups for one in group.ranges]
        by_device = defaultdict[int | None, list[int]](list)
        for i, one in enumerate(ranges):
            by_device[one.shard.device].append(i)
        digests = ReplicaDigests(groups, values, ranges, by_device.pop(None, []))
        for device, numbers in by_device.items():
            assert device is not None
            try:
                digests.add(numbers, self._on_device(device, [ranges[i] for i in numbers]).take(plan.ready[device]))
            except (ImportError, Unsupported) as error:
                digests.leave_out(numbers)
                if not self._refused:
                    self._refused = True
                    logger.warning("tensors of GPUs are not compared with those of other ranks: %s", error)
        return digests

    def news(self, groups: Iterable[ReplicaGroup | ValueGroup]) -> DescribeReplicas | None:
        """The description of the groups that the node worker does not know; None if it knows all."""
        new = {group.key: group.infos for group in groups if group.key not in self._described}
        if not new:
            return None
        anew = len(self._described) > _DESCRIBED
        if anew:
            new = {group.key: group.infos for group in groups}
            self._described.clear()
        self._described.update(new)
        return DescribeReplicas(new, anew)

    def _on_device(self, device: int, ranges: list[ReplicaRange]) -> DeviceRanges:
        import torch

        from ..gpu.replica_ranges import DeviceRanges

        if device not in self._devices or not self._devices[device].fits(ranges):
            self._devices[device] = DeviceRanges(torch.device("cuda", device), ranges)
        return self._devices[device]


class ReplicaDigests:
    """The digests of one save. ``on_host``: numbers of the ranges in host memory."""

    def __init__(
        self,
        groups: Sequence[ReplicaGroup],
        values: Sequence[ValueGroup],
        ranges: Sequence[ReplicaRange],
        on_host: Sequence[int],
    ) -> None:
        self._groups, self._values, self._ranges, self.on_host = groups, values, ranges, on_host
        self._left_out = set[int]()
        self._found = np.zeros((2, len(ranges)), np.uint64)
        self._pending = list[tuple[list[int], Callable[[], _Numbers]]]()

    @property
    def groups(self) -> list[ReplicaGroup | ValueGroup]:
        """The groups that have digests."""
        return [*self._groups, *self._values]

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Leave the groups of these ranges out, of which there are no digests."""
        left_out = {id(self._ranges[number]) for number in numbers}
        self._left_out |= {group.key for group in self._groups if any(id(one) in left_out for one in group.ranges)}

    def add(self, numbers: list[int], taken: Callable[[], _Numbers]) -> None:
        """Add the digests of these ranges, which a device takes: uint64 [2, ranges], once it has done so."""
        self._pending.append((numbers, taken))

    def wait_for_devices(self) -> None:
        """Wait until the ranges on GPUs have been read."""
        for numbers, taken in self._pending:
            self._found[:, numbers] = taken()
        self._pending.clear()

    def take_on_host(self) -> None:
        """Take the digests of the ranges in host memory."""
        for number in self.on_host:
            self._found[:, number] = range_digest(self._ranges[number])

    def packed(self) -> dict[int, bytes]:
        """The digests of each group by its key, as in ``EndSave``."""
        found, first = dict[int, bytes](), 0
        for group in self._groups:
            last = first + len(group.ranges)
            if group.key not in self._left_out:
                found[group.key] = self._found[:, first:last].astype("<u8").tobytes()
            first = last
        for values in self._values:
            found[values.key] = np.array([values.digests] * 2, "<u8").tobytes()
        return found
