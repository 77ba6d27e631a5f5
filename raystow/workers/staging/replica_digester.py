"""Takes the digests that a rank compares with other ranks, while a save reads its tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ...state.planner import SavePlan
from ...state.replica_digests import range_digest
from ...state.replica_groups import ReplicaGroup, ValueGroup
from ...storage.errors import Unsupported
from ..protocol.messages import DescribeReplicas

if TYPE_CHECKING:
    from ..gpu.replica_ranges import DeviceRanges

logger = logging.getLogger(__name__)

_Numbers = npt.NDArray[np.uint64]
_DESCRIBED = 4096  # groups that the node worker may remember


class ReplicaDigester:
    """Belongs to the staging thread. What the kernels of a GPU need is kept as long as the group is the same."""

    def __init__(self) -> None:
        self._described: dict[int, tuple[str, ...]] = {}  # the groups that the node worker knows, and their names
        self._devices: WeakKeyDictionary[ReplicaGroup, dict[int, DeviceRanges]] = WeakKeyDictionary()
        self._refused = False  # by a GPU or its software, which is logged once

    def begin(self, plan: SavePlan) -> ReplicaDigests:
        """Begin to take the digests of a save on its GPUs."""
        groups, values = plan.compared
        digests = ReplicaDigests(groups, values)
        try:
            for group in groups:
                for device in group.devices:
                    digests.add(group, device, self._on_device(device, group).take(plan.ready[device]))
        except (ImportError, Unsupported) as error:
            digests.leave_out_devices()
            if not self._refused:
                self._refused = True
                logger.warning("tensors of GPUs are not compared with those of other ranks: %s", error)
        return digests

    def news(self, groups: Iterable[ReplicaGroup | ValueGroup]) -> DescribeReplicas | None:
        """The description of the groups that the node worker does not know; None if it knows all."""
        new = {group.key: group for group in groups if self._described.get(group.key) != group.names}
        if not new:
            return None
        anew = len(self._described) > _DESCRIBED
        if anew:
            new = {group.key: group for group in groups}
            self._described.clear()
        self._described.update((key, group.names) for key, group in new.items())
        return DescribeReplicas({key: group.infos for key, group in new.items()}, anew)

    def _on_device(self, device: int, group: ReplicaGroup) -> DeviceRanges:
        import torch

        from ..gpu.replica_ranges import DeviceRanges

        made = self._devices.setdefault(group, {})
        if device not in made:
            made[device] = DeviceRanges(torch.device("cuda", device), [group.ranges[i] for i in group.numbers[device]])
        return made[device]


class ReplicaDigests:
    """The digests of one save."""

    def __init__(self, groups: Sequence[ReplicaGroup], values: Sequence[ValueGroup]) -> None:
        self._groups, self._values = groups, values
        self._found = {group.key: np.zeros((2, len(group.ranges)), "<u8") for group in groups}
        self._pending = list[tuple[ReplicaGroup, int, Callable[[], _Numbers]]]()

    @property
    def groups(self) -> list[ReplicaGroup | ValueGroup]:
        """The groups that have digests."""
        return [*self._groups, *self._values]

    @property
    def on_host(self) -> list[tuple[ReplicaGroup, int]]:
        """The ranges in host memory: their groups, and their numbers there."""
        return [(group, number) for group in self._groups for number in group.numbers.get(None, ())]

    @property
    def host_bytes(self) -> int:
        """Bytes of the ranges in host memory."""
        return sum(group.ranges[number].nbytes for group, number in self.on_host)

    def add(self, group: ReplicaGroup, device: int, taken: Callable[[], _Numbers]) -> None:
        """Add the digests of the ranges of a group on a device, which takes them: uint64 [2, ranges], once it has done so."""
        self._pending.append((group, device, taken))

    def leave_out_devices(self) -> None:
        """Leave the groups out that have ranges on devices, of which there are no digests."""
        self.wait_for_devices()
        self._groups = [group for group in self._groups if not group.devices]

    def wait_for_devices(self) -> None:
        """Wait until the ranges on GPUs have been read."""
        for group, device, taken in self._pending:
            self._found[group.key][:, group.numbers[device]] = taken()
        self._pending.clear()

    def take_on_host(self) -> None:
        """Take the digests of the ranges in host memory."""
        for group, number in self.on_host:
            self._found[group.key][:, number] = range_digest(group.ranges[number])

    def packed(self) -> dict[int, bytes]:
        """The digests of each group by its key, as in ``EndSave``."""
        found = {group.key: self._found[group.key].tobytes() for group in self._groups}
        return found | {values.key: np.array([values.digests] * 2, "<u8").tobytes() for values in self._values}
