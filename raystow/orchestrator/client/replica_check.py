"""Compares what this rank holds after a restore with what the other ranks hold."""

from __future__ import annotations

from ...state.planner import Planner, plan_save, tensors_of
from ...storage.errors import Damaged
from ...storage.format.replica_difference import CAUSES
from ...workers.packing.held_digests import HeldDigests
from ...workers.protocol.coordinator_client import CoordinatorClient
from ...workers.protocol.messages import CompareReplicas, JoinRun, ReplicaQuestions
from ...workers.staging.replica_digester import ReplicaDigester

_LISTED = 3


def check_replicas(into: object, member: JoinRun, port: CoordinatorClient, *, number: int, timeout: float) -> None:
    """Compare the tensors of a restored state on all ranks, all elements with all holders.

    Args:
        into: The state.
        member: This rank.
        port: The coordinator.
        number: Of this comparison among those of the process.
        timeout: Seconds to wait for other ranks.

    Raises:
        Damaged: Ranks hold other bits of the same tensor.
        RankRestarted: Another rank has been restarted meanwhile.
        DeadlineExceeded: Another rank does not compare.
    """
    rank, world_size = member.rank, member.world_size
    if world_size == 1:
        return
    tree = tensors_of(into, rank)
    plan = plan_save(tree, rank=rank, world_size=world_size, planner=Planner(compared="whole"))
    digests = ReplicaDigester().begin(plan)
    digests.take_on_host()
    digests.wait_for_devices()
    held = HeldDigests()
    held.add(rank, {group.key: group.infos for group in digests.groups}, digests.packed())
    request = CompareReplicas(rank, world_size, member.incarnation, number, timeout, held.of(rank))
    while isinstance(answer := port.ask(request), ReplicaQuestions):
        answers = tuple(map(held.answer, answer.questions))
        request = CompareReplicas(rank, world_size, member.incarnation, number, timeout, answers=answers)
    if found := answer.differences:
        more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        what = f"after the restore, {'; '.join(found[:_LISTED])}{more}; {CAUSES}"
        raise Damaged(what, subject="into", remedy="restore again; if it happens again, see docs/replicas.md")
