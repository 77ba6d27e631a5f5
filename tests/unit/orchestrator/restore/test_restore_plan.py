"""Restore plans state the bytes that a restore reads and their sources before the first read. Restores use the sources in the
order of the plan.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster
from helpers.processes import incarnation

from raystow import Box, PerRank
from raystow.orchestrator.restore.agreed import restore_agreed
from raystow.orchestrator.restore.agreement import ClusterAgreement
from raystow.orchestrator.restore.name_patterns import ANY_NAMES, STRICT, NameRules
from raystow.orchestrator.restore.plan import MEMORY, PEER, STORE, Sources
from raystow.orchestrator.restore.planner import RestoreOptions, plan_restore
from raystow.orchestrator.restore.what_if import plan_world
from raystow.state.objects import ObjectTree
from raystow.storage.errors import RankRestarted, StateError
from raystow.storage.format import keys
from raystow.storage.object_store import ObjectStore
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.versions.version import Version
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import (
    CoordinatorRequest,
    Message,
    RankReading,
    RestoreChoice,
    RestoreVote,
    UnusedByAll,
    UnusedNames,
)

MIB = 1 << 20


def two_tensors(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(3 * MIB, generator=generator), "b": torch.randn(2 * MIB, generator=generator), "lr": 0.1, "n": 7}


class Counting:
    """A store that counts the bytes read from packs and the reads of other objects."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self.read = store, 0
        self.objects = Counter[str]()

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self.objects[key] += 1
        return self._store.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> Any:
        self.read += length
        return self._store.get_range(key, start, length)

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        self.read += target.nbytes
        self._store.get_range_into(key, start, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture(scope="module")
def version() -> Version:
    with LocalCluster(f"memory://restore-plan-{SYSTEM.token()}", nodes=2) as cluster:
        saved = cluster.save_all([two_tensors(1), two_tensors(1)], step=1)
        assert {chunk.node for rows in saved.chunks.values() for chunk in rows} == {0, 1}
        return saved


def fresh(version: Version) -> tuple[Version, Counting]:
    """Return the version with a counting store and an empty cache."""
    store = Counting(version.store)
    return Version(store, version.entry, version.repository_id), store  # type: ignore[arg-type]


def test_a_plan_reads_no_pack_and_predicts_the_bytes_read(version):
    reading, store = fresh(version)
    into = two_tensors(2)
    before = into["a"].clone()
    plan = plan_restore(reading, into, RestoreOptions(world_size=2))
    assert store.read == 0
    assert torch.equal(into["a"], before)
    decoded: list[int] = []
    plan.execute(decoded.append)
    assert store.read == plan.nbytes == version.bytes
    assert sum(decoded) == plan.raw == version.raw
    assert all(torch.equal(into[name], two_tensors(1)[name]) for name in "ab")
    assert (into["lr"], into["n"], plan.names) == (0.1, 7, {"a", "b"})


def test_a_partial_restore_reads_only_its_tensors(version):
    reading, store = fresh(version)
    into = {"b": torch.zeros(2 * MIB)}
    plan = plan_restore(reading, into, RestoreOptions(names=ANY_NAMES))
    assert plan.nbytes == sum(row.coding.size for row in version.chunks["b"])
    plan.execute()
    assert store.read == plan.nbytes
    with pytest.raises(StateError, match="saved but not in `into`: a, lr, n"):
        plan_restore(reading, into)


def test_each_rank_reads_the_fragment_of_its_own_tensors():
    """A name that is not asked for is found by one of the ranks."""

    def state(rank: int) -> dict[str, Any]:
        return {"w": torch.ones(8), "own": PerRank({"x": torch.full((3 + rank,), float(rank)), "n": rank})}

    def read(rank: int, into: dict[str, Any], rules: NameRules = STRICT) -> set[str]:
        reading, store = fresh(version)
        plan_restore(reading, ObjectTree(into, what="into").into(), RestoreOptions(rank, 4, rules))
        return store.objects.keys() - {version.record_key}

    with LocalCluster(f"memory://per-rank-{SYSTEM.token()}", nodes=4) as cluster:
        version = cluster.save_all([{**state(rank), "box": row(rank)} for rank in range(4)], step=1)
    node_of = {rank: info.node for info in version.record.fragments for rank in info.ranks}
    fragments = [keys.fragment(version.id, version.attempt, node_of[rank]) for rank in range(4)]
    for rank in range(4):
        into = {**state(9), "box": row(rank)}
        assert read(rank, into) == {fragments[0], fragments[rank]}, "small tensors of all ranks are stored by the first"
    assert read(0, into, ANY_NAMES) == {*fragments}, "it names for all ranks what is left out"
    assert read(3, into, ANY_NAMES) == {fragments[0], fragments[3]}
    with pytest.raises(StateError, match="saved but not in `into`: box"):
        read(2, state(9))


def row(rank: int) -> Box:
    """This rank's row of a matrix."""
    return Box(torch.full((1, 4), float(rank)), (4, 4), (rank, 0))


@pytest.mark.parametrize("stray", [{}, {"c": torch.zeros(1)}])
def test_unmatched_names_are_reported(version, stray):
    """Each object is read once: a node worker treats a second request as a report that the first answer was wrong."""
    reading, store = fresh(version)
    with pytest.raises(StateError, match="saved but not in `into`: a, lr, n"):
        plan_restore(reading, {"b": torch.zeros(2 * MIB), **stray}, RestoreOptions(world_size=2))
    assert store.objects == dict.fromkeys(
        [version.record_key, *(keys.fragment(version.id, version.attempt, n) for n in (0, 1))], 1
    )


def test_a_plan_states_the_source_and_the_cost(version):
    plan = plan_restore(version, two_tensors(2), sources=Sources({0: ["here", "there"], 1: ["there"]}, "here"))
    first, second = plan.reads
    assert (first.source, second.source) == (MEMORY, PEER)
    assert (first.seconds, second.seconds) == (first.nbytes / 1e9, second.nbytes / 5e8)
    assert plan.seconds == first.seconds + second.seconds
    assert "MB from this node's memory" in plan.summary()
    assert "MB from other nodes' memory" in plan.summary()


def test_all_parts_come_from_the_store_if_no_node_has_them(version):
    parts = plan_restore(version, two_tensors(2), sources=Sources({}, "here")).reads
    assert {part.source for part in parts} == {STORE}
    assert sum(part.seconds for part in parts) == pytest.approx(version.bytes / 1.2e8)


def test_nodes_contact_different_peers_first_never_themselves():
    near = {0: ["a", "b", "c", "d"]}
    orders = {here: Sources(near, here).peers(0) for here in ("a", *(f"new{i}" for i in range(20)))}
    assert "a" not in orders["a"]
    assert all(sorted(order) == near[0] for here, order in orders.items() if here != "a")
    assert len({order[0] for order in orders.values()}) > 1


def test_chunks_are_split_evenly_for_another_world_size(version):
    plan = plan_world(version, 5, per_node=2)
    assert [len(plan.ranks), len(plan.nodes)] == [5, 3]
    assert sum(rank.needed for rank in plan.ranks) == pytest.approx(version.bytes, rel=1e-6)
    assert plan.store.nbytes == version.bytes
    assert plan.amplification == pytest.approx(1.0)
    shared = sum(node.nbytes for node in plan.nodes) - version.bytes
    assert shared > 0
    assert sum(node.passed_on for node in plan.nodes) == pytest.approx(shared, abs=len(plan.nodes))
    slow_store = max(node.nbytes - node.passed_on for node in plan.nodes) / 1e6
    assert plan.seconds(store=1e6, peer=1e12) == pytest.approx(slow_store, rel=1e-3)
    assert plan.seconds(store=1e12, peer=1e3) == pytest.approx(max(node.passed_on for node in plan.nodes) / 1e3, rel=1e-3)
    for first, node in zip((0, 2, 4), plan.nodes, strict=True):
        assert node.nbytes <= sum(rank.nbytes for rank in plan.ranks[first : first + 2])


def test_whole_tensors_are_read_once_and_sent_to_other_nodes(version):
    plan = plan_world(version, 4, per_node=2, whole=True)
    assert {rank.nbytes for rank in (*plan.ranks, *plan.nodes)} == {version.bytes}
    assert (plan.store.nbytes, plan.amplification) == (version.bytes, 1.0)
    assert [node.passed_on for node in plan.nodes] == [pytest.approx(version.bytes / 2, abs=1)] * 2


def test_empty_tensors_and_scalars_are_planned():
    with LocalCluster(f"memory://restore-plan-{SYSTEM.token()}") as cluster:
        saved = cluster.save({"none": np.empty((0, 3)), "one": np.float32(2.0), "step": torch.tensor(3)}, step=1)
    into = {"none": np.empty((0, 3)), "one": np.float32(0.0), "step": torch.tensor(0)}
    plan_restore(saved, into).execute()
    assert (into["one"], int(into["step"])) == (2.0, 3)
    assert sum(node.nbytes for node in plan_world(saved, 3, per_node=1).nodes) == 3 * saved.bytes


class Port(CoordinatorClient):
    """A coordinator that lets each rank restore one version. ``reports``: that ranks read on."""

    def __init__(self, choice: RestoreChoice) -> None:
        self._choice, self.reports = choice, list[RankReading]()

    def send(self, request: CoordinatorRequest[Any]) -> None:
        assert isinstance(request, RankReading)
        self.reports.append(request)

    def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
        assert isinstance(request, RestoreVote)
        return self._choice


def test_a_restore_logs_its_plan_and_the_bytes_by_source(caplog):
    """Two nodes saved the version. This node still has its own part; the other node is listed for its part, but does not
    answer.
    """
    caplog.set_level("INFO", logger="raystow")
    with LocalCluster(f"memory://restore-plan-{SYSTEM.token()}", nodes=2) as cluster:
        saved = cluster.save_all([two_tensors(1), two_tensors(1)], step=5)
        record = cluster.repository.store.get(saved.record_key, max_bytes=saved.entry.size)
        near = {info.node: ["node-0" if 0 in info.ranks else "node-1"] for info in saved.record.fragments}
        port = Port(RestoreChoice(saved.entry, near, record))
        agreement = ClusterAgreement(
            cluster.repository,
            port,
            RestoreVote(0, 2, incarnation("me"), 1, 60.0),
            itertools.count(2),
            lambda: cluster.address(0),
            here="node-0",
        )
        into = two_tensors(2)
        assert restore_agreed(cluster.repository, into, agreement, RestoreOptions(world_size=2)) == saved
    assert all(torch.equal(into[name], two_tensors(1)[name]) for name in "ab")
    plan, read = (entry.getMessage() for entry in caplog.records if "MB from" in entry.getMessage())
    assert plan.startswith("restoring version 1 (step 5): ")
    assert megabytes(plan).keys() == {"this node's memory", "other nodes' memory"}
    mine = sum(info.stored + info.size for info in saved.record.fragments if 0 in info.ranks) / 1e6
    others = sum(info.stored + info.size for info in saved.record.fragments if 0 not in info.ranks) / 1e6
    assert megabytes(read) == {"this node's memory": pytest.approx(mine, abs=0.1), "the store": pytest.approx(others, abs=0.1)}
    (fields,) = (entry.bytes_read for entry in caplog.records if hasattr(entry, "bytes_read"))
    assert {source: nbytes / 1e6 for source, nbytes in fields.items()} == {
        "memory": pytest.approx(mine, abs=0.1),
        "store": pytest.approx(others, abs=0.1),
    }


def test_ranks_compare_names_again_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    """A rank has written nothing by then. It asks about names only if the ranks restore different ones."""

    class Comparing(Port):
        def __init__(self, choice: RestoreChoice) -> None:
            super().__init__(choice)
            self.answers, self.compared = [None, b"", b""], list[bytes]()

        def send(self, request: CoordinatorRequest[Any]) -> None:
            if isinstance(request, UnusedNames):
                self.call(request, 0.0)

        def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
            if not isinstance(request, UnusedNames):
                return super().call(request, timeout)
            self.compared.append(request.unused)
            if (answer := self.answers.pop(0)) is None:
                raise RankRestarted("rank 1 was restarted", remedy="restore again")
            return UnusedByAll(answer)

    with LocalCluster(f"memory://restore-plan-{SYSTEM.token()}") as cluster:
        saved = cluster.save(two_tensors(1), step=5)  # a, b, lr, n
        port = Comparing(RestoreChoice(saved.entry, alike=False))
        for into in ({"a": torch.zeros(3 * MIB), "lr": 0, "n": 0}, two_tensors(2) | {"n": 0}):
            vote = RestoreVote(0, 2, incarnation("me"), 1, 60.0)
            agreement = ClusterAgreement(cluster.repository, port, vote, itertools.count(2), lambda: cluster.address(0))
            assert restore_agreed(cluster.repository, into, agreement, RestoreOptions(0, 2)) == saved
            assert torch.equal(into["a"], two_tensors(1)["a"])
            port.answers = port.answers[-2:]
        assert port.compared == [bytes([2]), bytes([2]), b""]
        into, port.answers = {"a": torch.zeros(3 * MIB), "lr": 0}, [bytes([8])]
        agreement = ClusterAgreement(cluster.repository, port, vote, itertools.count(2), lambda: cluster.address(0))
        with pytest.raises(StateError, match="saved but not in `into`: n "):
            restore_agreed(cluster.repository, into, agreement, RestoreOptions(0, 2))
        assert (into["a"].count_nonzero(), port.compared[-1]) == (0, bytes([2 + 8]))


def test_ranks_of_a_node_read_the_record_once():
    """The coordinator does not have the record."""
    uri = f"memory://restore-plan-{SYSTEM.token()}"
    with LocalCluster(uri) as cluster:
        saved = cluster.save(two_tensors(1), step=5)
    with LocalCluster(uri) as restarted:
        read = Counter[str]()
        ranks = [
            ClusterAgreement(
                restarted.repository,
                Port(RestoreChoice(saved.entry)),
                RestoreVote(i, 2, incarnation(f"{i}"), 1, 60.0),
                itertools.count(2),
                lambda: restarted.address(0),
            )
            for i in range(2)
        ]
        for rank in ranks:
            rank.settle(None, "")
            assert rank.version(saved.entry).record == saved.record
            assert rank.cache is not None
            read.update(rank.cache.read)
        for rank in ranks:
            rank.give_up("enough")
    assert read == {"store": saved.entry.size}


def test_a_rank_tells_the_others_now_and_then_that_it_reads():
    """Not for each chunk, and not once it reads no more."""
    with LocalCluster(f"memory://restore-plan-{SYSTEM.token()}") as cluster:
        saved, port = cluster.save(two_tensors(1), step=5), Port(RestoreChoice(cluster.repository.latest().entry))
        for number, timeout in ((1, 0.0), (2, 600.0)):
            vote = RestoreVote(0, 1, incarnation("me"), number, timeout)
            agreement = ClusterAgreement(cluster.repository, port, vote, itertools.count(3), lambda: cluster.address(0))
            assert restore_agreed(cluster.repository, two_tensors(2), agreement) == saved
    assert {*port.reports} == {RankReading(0, incarnation("me"), 1, 0.0)}


@pytest.mark.parametrize("when", ["waits at first", "reads", "waits at last"])
def test_the_others_are_told_of_an_interrupted_rank(when):
    errors = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    class Interrupted(Port):
        def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
            assert isinstance(request, RestoreVote)
            errors.append(request.error)
            if not request.error and when == ("waits at first" if request.tried is None else "waits at last"):
                interrupt()
            return super().call(request, timeout)

    with LocalCluster(f"memory://restore-plan-{SYSTEM.token()}") as cluster:
        port, vote = (
            Interrupted(RestoreChoice(cluster.save(two_tensors(1), step=5).entry)),
            RestoreVote(0, 2, incarnation("me"), 1, 60.0),
        )
        agreement = ClusterAgreement(cluster.repository, port, vote, itertools.count(2), lambda: cluster.address(0))
        progress = interrupt if when == "reads" else None
        with pytest.raises(KeyboardInterrupt):
            restore_agreed(cluster.repository, two_tensors(2), agreement, progress=progress)
    assert errors[-1] == "KeyboardInterrupt()"


@pytest.mark.parametrize("near", [{0: ("here",)}, {}], ids=["in memory", "not in memory"])
def test_bytes_damaged_in_memory_are_read_from_the_store(caplog, near):
    """A rank that restores alone does not ask the node worker for what no node has in memory."""
    with LocalCluster(f"memory://restore-plan-{SYSTEM.token()}") as cluster:
        saved = cluster.save(two_tensors(1), step=5)
        corrupt_chunk(cluster, saved)
        choice, alone = RestoreChoice(saved.entry, near=near), RestoreVote(0, 1, incarnation("me"), 1, 60.0)
        agreement = ClusterAgreement(cluster.repository, Port(choice), alone, itertools.count(2), lambda: cluster.address(0))
        into = two_tensors(2)
        assert restore_agreed(cluster.repository, into, agreement) == saved
    assert all(torch.equal(into[name], two_tensors(1)[name]) for name in "ab")
    assert ("is read without the node worker" in caplog.text) == bool(near)


def corrupt_chunk(cluster: LocalCluster, saved: Version) -> None:
    """Flip a bit of a chunk in the memory of the node worker."""
    row = saved.chunks["a"][0]
    key = keys.pack(saved.id, saved.attempt, row.node, row.group, row.pack)
    lent = cluster.tier(0).lend(cluster.repository.id, key)
    assert lent is not None
    with open(lent.descriptor, "r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, row.start)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), row.start)


def megabytes(text: str) -> dict[str, float]:
    return {where: float(number) for number, where in re.findall(r"([\d.]+) MB from ([a-z']+(?: [a-z']+)+)", text)}


class Meeting(Port):
    """Answers a finished rank only once both ranks have finished, as the coordinator does."""

    def __init__(self, choice: RestoreChoice) -> None:
        super().__init__(choice)
        self.first, self.both = threading.Event(), threading.Barrier(2, timeout=60)

    def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
        assert isinstance(request, RestoreVote)
        if request.tried is not None:
            self.first.set()
            self.both.wait()
        return super().call(request, timeout)


def test_chunks_stay_for_the_slower_ranks_of_the_node(caplog):
    caplog.set_level("INFO", logger="raystow.orchestrator.restore.agreement")
    uri = f"memory://restore-plan-{SYSTEM.token()}"
    with LocalCluster(uri) as cluster:
        saved = cluster.save(two_tensors(1), step=5)
    # the node worker of the second cluster has no object in memory
    with LocalCluster(uri) as restarted, ThreadPoolExecutor(1) as beside:
        port = Meeting(RestoreChoice(saved.entry))

        def restore(rank: int) -> None:
            agreement = ClusterAgreement(
                restarted.repository,
                port,
                RestoreVote(rank, 2, incarnation(f"{rank}"), 1, 60.0),
                itertools.count(2),
                lambda: restarted.address(0),
            )
            assert restore_agreed(restarted.repository, two_tensors(2), agreement, RestoreOptions(rank, 2)) == saved

        quick = beside.submit(restore, 0)
        assert port.first.wait(60)
        restore(1)
        quick.result(60)
    read = sorted(entry.getMessage() for entry in caplog.records if "has read" in entry.getMessage())
    assert [megabytes(text).keys() for text in read] == [{"the store"}, set()]
