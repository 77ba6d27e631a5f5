"""Thinning to chains of deltas: each version keeps its exact bits after concurrent changes and after a kill at any point."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.delta_versions import as_it_was, star
from helpers.fake_clock import FakeClock
from helpers.killed_store import Killed, KilledStore
from helpers.training_versions import collect
from helpers.weight_history import bases, train, weights

import raystow
from raystow.orchestrator.restore.planner import plan_restore
from raystow.storage.checks.repair import plan_repair
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged
from raystow.storage.format import keys
from raystow.storage.repository import Repository
from raystow.storage.retention.policy import Policy
from raystow.storage.root import invariants
from raystow.storage.root.delta_chain import dependents
from raystow.storage.stores.memory import MemoryStore

CHAINED = Policy(resumable=1, delta=3)


def flip(repository: Repository, id: int) -> str:
    """Damage the weights of a version. Return the key of the pack."""
    key = keys.pack(id, repository.version(id).attempt, 0, "weights", 0)
    data = repository.store.get(key, max_bytes=1 << 20)
    repository.store.put(key, [bytes([data[0] ^ 1]) + data[1:-1] + bytes([data[-1] ^ 1])])
    return key


def check(repository: Repository, wanted: list[dict[str, bytes]]) -> None:
    for version in repository.versions():
        repository.verify(version)
        assert weights(version) == wanted[version.id - 1]


@pytest.fixture
def wanted(repository: Repository) -> list[dict[str, bytes]]:
    return train(Committer(repository, "me"), 8)


def test_each_version_becomes_a_delta_to_its_predecessor(
    repository: Repository, wanted: list[dict[str, bytes]], clock: FakeClock
) -> None:
    plan = repository.plan_retention(CHAINED)
    older = "no rule drops it; older than the last 1 resumable"
    assert [decision.why for decision in plan.decisions] == [
        older,
        *(f"{older}, as a delta to version {base}" for base in (1, 2, 3)),
        older,
        *(f"{older}, as a delta to version {base}" for base in (5, 6)),
        "newest",
    ]
    likely, other = (plan.replacement(decision.entry).stored for decision in plan.decisions[:2])
    plan.execute()
    assert bases(repository) == [(), (1,), (2,), (3,), (), (5,), (6,), ()]
    assert other < 0.6 * likely, "the plan expects fewer bytes for a delta"
    assert [version.resumable for version in repository.versions()] == [False] * 7 + [True]
    check(repository, wanted)
    collect(repository, clock)
    check(repository, wanted)
    sizes = [version.bytes for version in repository.versions()]
    assert max(sizes[1:4]) < 0.8 * sizes[0] < 0.8 * sizes[4] * 1.01
    assert not repository.plan_retention(CHAINED).thinned


def test_repeated_retention_makes_the_same_chains(repository: Repository) -> None:
    committer = Committer(repository, "me")
    for _ in range(8):
        train(committer, 1)
        repository.plan_retention(CHAINED).execute()
    assert bases(repository)[1:4] == [(1,), (2,), (3,)]
    assert bases(repository)[4] == ()


def test_deltas_to_one_base_become_a_chain(repository: Repository, clock: FakeClock) -> None:
    arrays = star(Committer(repository, "me"))
    repository.plan_retention(CHAINED).execute()
    assert bases(repository) == [(), (1,), (2,), ()]
    assert {row.coding.base for rows in repository.version(3).chunks.values() for row in rows} <= {2, None}
    collect(repository, clock)
    assert all(as_it_was(version, arrays) for version in repository.versions())


def test_a_restore_reads_all_bases_of_the_chain(repository: Repository, wanted: list[dict[str, bytes]]) -> None:
    repository.plan_retention(CHAINED).execute()
    version = repository.version(4)
    into = {"model.scale": torch.zeros(2, 200), "model.w": torch.zeros(200, 200, dtype=torch.bfloat16)}
    plan = plan_restore(version, into)
    assert [part.base for part in plan.reads if part.base] == [1, 2, 3]
    raystow.restore(version, into)
    assert {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in into.items()} == wanted[3]


def test_a_base_stays_as_long_as_a_delta_needs_it(
    repository: Repository, wanted: list[dict[str, bytes]], clock: FakeClock
) -> None:
    """It stays even if no rule of the policy keeps it."""
    repository.plan_retention(CHAINED).execute()
    plan = repository.plan_retention(Policy(keep_last=5, resumable=1, delta=3))
    assert [decision.why for decision in plan.decisions[:4]] == [
        "base of version 2",
        "base of version 3",
        "base of version 4",
        "last 5",
    ]
    assert plan.execute() == ()
    gone = repository.plan_retention(Policy(keep_last=4)).execute()
    assert [entry.id for entry in gone] == [1, 2, 3, 4]
    collect(repository, clock)
    check(repository, wanted)


def test_a_version_kept_only_as_a_base_gets_no_new_deltas(repository: Repository, wanted: list[dict[str, bytes]]) -> None:
    repository.plan_retention(Policy(resumable=5, delta=6)).execute()
    assert bases(repository)[:4] == [(), (1,), (2,), ()]
    plan = repository.plan_retention(Policy(keep_last=4, resumable=1, delta=6))
    assert [(decision.verdict, decision.base) for decision in plan.decisions[4:]] == [
        ("thin", None),
        ("thin", 5),
        ("thin", 6),
        ("keep", None),
    ]


def test_compaction_frees_bases_that_no_other_version_needs(
    repository: Repository, wanted: list[dict[str, bytes]], clock: FakeClock
) -> None:
    repository.plan_retention(Policy(resumable=1, delta=6)).execute()
    repository.pin(repository.version(3), "good")
    plan = repository.plan_retention(Policy(keep_last=1), compact=True)
    assert [decision.verdict for decision in plan.decisions] == ["drop", "drop", "compact", *["drop"] * 4, "keep"]
    assert plan.moved(repository.version(3).entry) > sum(version.bytes for version in repository.versions()[:3])
    plan.execute()
    collect(repository, clock)
    assert [version.id for version in repository.versions()] == [3, 8]
    check(repository, wanted)


# Concurrent changes


def test_a_version_is_unchanged_if_its_new_base_is_dropped(
    repository: Repository, wanted: list[dict[str, bytes]], clock: FakeClock
) -> None:
    plan = repository.plan_retention(CHAINED)
    early, late = (plan.replacement(entry) for entry in plan.thinned[:2])
    assert (early.version.id, late.version.id) == (7, 6)

    def dropped(nbytes: int) -> None:
        plan = repository.plan_retention(Policy(keep_last=3))
        if [entry.id for entry in plan.dropped] == [1, 2, 3, 4]:  # version 5 is leased, so only an older plan drops it
            replace(plan, decisions=tuple(replace(one, keep=one.entry.id > 5) for one in plan.decisions)).drop()

    assert late.execute(progress=dropped) is None
    assert 5 not in {version.id for version in repository.versions()}
    repository.plan_retention(Policy(keep_last=2)).execute()
    assert early.execute() is None
    check(repository, wanted)
    collect(repository, clock)


def test_concurrent_plans_cannot_exceed_the_chain_limit(
    repository: Repository, wanted: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plan is valid alone; together the concurrent plans would make a chain that is too long."""
    monkeypatch.setattr(invariants, "MAX_CHAIN", 4)
    plan = repository.plan_retention(Policy(resumable=1, delta=2))
    chain = replace(plan, decisions=tuple(replace(one, base=one.entry.id - 1) for one in plan.decisions))
    assert [chain.replacement(entry).execute() is not None for entry in plan.thinned[:4]] == [True] * 3 + [False]
    assert bases(repository) == [(), (), (), (), (4,), (5,), (6,), ()]
    check(repository, wanted)
    again = repository.plan_retention(Policy(resumable=1, delta=2))
    assert {one.entry.id: one.base for one in again.decisions if one.thin} == {1: None, 2: 1, 3: 2, 4: None}
    again.execute()
    assert bases(repository) == [(), (1,), (2,), (), (4,), (5,), (6,), ()]
    check(repository, wanted)


@pytest.mark.parametrize("after", [False, True])
def test_a_run_after_a_kill_at_any_point_finishes_the_plan(
    repository: Repository, store: MemoryStore, clock: FakeClock, *, after: bool
) -> None:
    wanted = train(Committer(repository, "me"), 3)
    for last in range(1, 199):
        interrupted = Repository(KilledStore(store, last, after=after), repository.id, clock=clock)  # type: ignore[arg-type]
        try:
            interrupted.plan_retention(Policy(resumable=1, delta=2)).execute()
        except Killed:
            pass
        assert [weights(version) for version in repository.versions()] == wanted
        collect(repository, clock)
        assert [weights(version) for version in repository.versions()] == wanted
        if bases(repository) == [(), (1,), ()] and not repository.version(1).resumable:
            break
    assert last > 4


def test_a_lease_protects_all_bases_of_a_version(
    repository: Repository, wanted: list[dict[str, bytes]], clock: FakeClock
) -> None:
    repository.plan_retention(CHAINED).execute()
    version = repository.version(4)
    with repository.lease(version):
        plan = repository.plan_retention(Policy(keep_last=1))
        assert [decision.keep for decision in plan.decisions[:5]] == [True] * 4 + [False]
        plan.execute()
        repository.plan_collection(grace=0.0).execute()
        assert weights(version) == wanted[3]


# Damage and repair


def test_damage_of_a_base_is_reported_for_each_delta(repository: Repository, wanted: list[dict[str, bytes]]) -> None:
    repository.plan_retention(CHAINED).execute()
    pack = flip(repository, 2)
    assert dependents(repository.root().versions, 2) == [3, 4]
    for id in (2, 3, 4):
        with pytest.raises(Damaged) as caught:
            repository.verify(repository.version(id))
        assert caught.value.subject == pack
        assert id == 2 or f"version {id}" in caught.value.what
    for id in (1, 5, 6, 7, 8):
        repository.verify(repository.version(id))


def test_an_unreadable_version_is_not_used_as_a_base(repository: Repository, wanted: list[dict[str, bytes]]) -> None:
    flip(repository, 2)
    plan = repository.plan_retention(CHAINED)
    with pytest.raises(Damaged, match="weights"):
        plan.replacement(plan.decisions[2].entry).execute()
    assert repository.version(3).resumable


@pytest.mark.parametrize("collected", [False, True])
def test_repair_restores_the_whole_chain(
    repository: Repository, wanted: list[dict[str, bytes]], clock: FakeClock, *, collected: bool
) -> None:
    repository.plan_retention(CHAINED).execute()
    if collected:
        collect(repository, clock)
    repository.store.delete([keys.ROOT])
    plan_repair(repository.store, clock).execute()
    assert [version.resumable for version in repository.versions()] == [not collected] * 7 + [True]
    check(repository, wanted)
