"""Measure what parts cost the coordinator, compared with as many more ranks.

``python benchmarks/control_plane_parts.py`` drives the coordinator's state machine and its committer, with a store in memory,
through whole saves by eight ranks or parts on each node. It writes the CPU time of one save, the least of several rounds, in
which the cases take turns.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import report
from control_plane_save import DIGESTS, RANKS
from helpers.begins import begin_of
from helpers.builders import memory_repository
from helpers.processes import incarnation
from rich.console import Console

from raystow.orchestrator.coordinator.attempts import Coordinator
from raystow.storage.commit.committer import Committer
from raystow.storage.format.parts import part_number
from raystow.storage.format.version_record import FragmentInfo
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.protocol.messages import COORDINATOR_REQUESTS, Begin, Ticket, decode, encode

_SAVES, _ROUNDS = 20, 7
_RANKS, _MORE = 256, (16, 256)


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
    """Measure the costs, print them and write the result file."""
    about = report.about("raystow", "ray")
    cases = [(_RANKS, 0), *((_RANKS + more, 0) for more in _MORE), *((_RANKS, more) for more in _MORE)]
    rounds = [[cost(*case) for case in cases] for _ in range(_ROUNDS)]
    least = dict(zip(cases, map(min, zip(*rounds, strict=True)), strict=True))
    alone = least[_RANKS, 0]
    added = {more: [1e3 * (least[case] - alone) for case in ((_RANKS + more, 0), (_RANKS, more))] for more in _MORE}
    held = {f"{more} parts cost less than as many ranks": parts < ranks for more, (ranks, parts) in added.items()}
    table = report.table_of(f"CPU time of a save: {1e3 * alone:.1f} ms by {_RANKS} ranks, and", "ranks, ms", "parts, ms")
    for more, figures in added.items():
        table.add_row(f"{more} more", *(f"{figure:.2f}" for figure in figures))
    console = Console()
    report.show(console, [table], held)
    figures_of = {more: {"as ranks ms": ranks, "as parts ms": parts} for more, (ranks, parts) in added.items()}
    results = {"ranks": _RANKS, "ms": 1e3 * alone, "more": figures_of}
    report.write(console, Path(__file__).parent / "results", "control_plane_parts", {**about, "results": results, "claims": held})


if __name__ == "__main__":
    main()
