"""Measure what parts cost the coordinator, compared with as many more ranks.

``python benchmarks/control_plane_parts.py`` drives the coordinator's state machine and its committer, with a store in memory,
through whole saves by eight ranks or parts on each node, and prints the CPU time of one save.
"""

from __future__ import annotations

import time
from typing import Any

from control_plane_save import DIGESTS, RANKS
from helpers.begins import begin_of
from helpers.builders import memory_repository
from helpers.processes import incarnation

from raystow.orchestrator.coordinator.attempts import Coordinator
from raystow.storage.commit.committer import Committer
from raystow.storage.format.parts import part_number
from raystow.storage.format.version_record import FragmentInfo
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.protocol.messages import COORDINATOR_REQUESTS, Begin, Ticket, decode, encode

_SAVES = 20


def cost(ranks: int, parts: int) -> float:
    """Return the least CPU seconds of a save."""
    repository = memory_repository(SYSTEM)
    committer = Committer(repository, "benchmark")
    core, names = Coordinator(committer, SYSTEM, writer={}), tuple(f"part-{i}" for i in range(parts))
    members = [*range(ranks), *map(part_number, names)]
    who = {member: incarnation(f"process {member}", repository.id) for member in members}
    for member in members:
        core.join(member, who[member], ranks)
    seconds = list[float]()
    for save in range(1, _SAVES + 1):
        begins, tickets = list[bytes](), dict[int, Ticket]()
        for place, member in enumerate(members):
            of_rank: dict[str, Any] = {"metrics": {"loss": "1"}, "parts": ",".join(names)} if member < ranks else {}
            world = ranks if member < ranks else 1
            begins.append(encode(begin_of(member, world, who[member], save, f"node-{place // RANKS}", save, **of_rank)))
        start = time.process_time()
        for member, data in zip(members, begins, strict=True):
            begun = decode(data, *COORDINATOR_REQUESTS)
            assert isinstance(begun, Begin)
            ticket = core.begin(begun) if member < ranks else core.begin_part(begun)
            assert ticket is not None
            tickets[member] = ticket
        for member, ticket in tickets.items():
            core.finished(ticket, member, 0, DIGESTS if member < ranks else ())
        for node in range(len(tickets) // RANKS):
            on_node = tuple(members[node * RANKS : (node + 1) * RANKS])
            info = FragmentInfo(node, 0, "00" * 32, on_node, 0, 0, 0, packs=0)
            core.staged(tickets[on_node[0]], info)
            core.fragment(tickets[on_node[0]], info)
        attempt = core.next_commit()
        assert attempt is not None
        core.settled(attempt, committer.commit(core.record(attempt)).entry)
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    """Print the costs."""
    without = cost(256, 0)
    print(f"256 ranks: {without * 1e3:.1f} ms")
    for count in (16, 256):
        more_ranks, more_parts = cost(256 + count, 0) - without, cost(256, count) - without
        print(f"{count} more ranks: {more_ranks * 1e3:.2f} ms, {count} parts: {more_parts * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
