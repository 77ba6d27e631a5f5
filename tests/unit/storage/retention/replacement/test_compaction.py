"""Compaction writes a delta version whole; its exact bits stay after concurrent changes and after a kill at any point."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.builders import overwrite_root
from helpers.delta_versions import as_it_was, star
from helpers.fake_clock import FakeClock
from helpers.killed_store import Killed, KilledStore
from helpers.training_versions import bits, collect
from helpers.weight_history import bases

from raystow.storage.checks.repair import plan_repair
from raystow.storage.commit.committer import Committer
from raystow.storage.commit.leases import Lease
from raystow.storage.errors import Damaged, Fenced, StateError
from raystow.storage.format import keys
from raystow.storage.repository import Repository
from raystow.storage.retention import replacement
from raystow.storage.retention.policy import Policy
from raystow.storage.stores.memory import MemoryStore


def compact(repository: Repository, id: int = 2) -> bool:
    return replacement.plan(repository, repository.version(id).entry, replacement.compact()).execute() is not None


def test_compacted_versions_keep_all_bits_and_need_no_base(repository: Repository, clock: FakeClock) -> None:
    arrays = star(Committer(repository, "me"))
    before = repository.version(2)
    wanted, rows = bits(before), before.chunks
    plan = repository.plan_compaction()
    assert plan.explain() == [
        "version 2 (step 0): written whole: needs version 1 now",
        "version 3 (step 0): written whole: needs version 1 now",
    ]
    assert [entry.id for entry in plan.execute()] == [2, 3]
    assert bases(repository) == [(), (), (), ()]
    after = repository.version(2)
    assert bits(after) == wanted
    assert after.record.bases == ()
    for name, same in after.chunks.items():
        assert [(row.box, row.raw_digest) for row in same] == [(row.box, row.raw_digest) for row in rows[name]]
        assert [row.derivation for row in same] == [row.derivation for row in rows[name]]
        assert {row.coding.base for row in same} == {None}
    repository.plan_retention(Policy(keep_last=3)).execute()
    collect(repository, clock)
    for version in repository.versions():
        repository.verify(version)
        assert as_it_was(version, arrays)
    assert repository.plan_compaction().entries == ()


def test_a_replaced_attempt_is_readable_until_collected(repository: Repository, clock: FakeClock) -> None:
    arrays = star(Committer(repository, "me"))
    found = repository.version(2), repository.version(2)
    assert compact(repository, 2)
    assert compact(repository, 3)
    repository.plan_retention(Policy(keep_last=3)).execute()
    assert bases(repository) == [(), (), ()]
    assert as_it_was(found[0], arrays)
    collect(repository, clock)
    with pytest.raises(Damaged):
        bits(found[1])


def test_the_planned_size_is_computed_from_the_delta_itself(repository: Repository) -> None:
    """The base has zero moments, as at the first step; the delta has nonzero moments and several chunks of each kind."""
    import numpy as np
    from helpers.builders import whole, write
    from helpers.delta_versions import WORDS

    def arrays(step: int) -> dict[str, np.ndarray]:
        moments = {f"optimizer.m{i}": WORDS[i % 4] * min(step, 1) ^ i for i in range(4)}
        return {**{f"model.w{i}": (WORDS[i % 4] >> i) + step for i in range(12)}, **moments}

    committer = Committer(repository, "me")
    for step in range(3):
        base = (1, arrays(0)) if step == 1 else None
        write(committer, {name: whole(array) for name, array in arrays(step).items()}, base=base)
    (entry,) = repository.plan_compaction([2]).entries
    estimated, first = repository.plan_compaction([2]).replacement(entry).stored, repository.version(1).bytes
    assert compact(repository, 2)
    written = repository.version(2).bytes
    assert abs(estimated - written) < 0.05 * written
    assert first < 0.9 * written


def test_a_base_may_be_a_delta_itself(repository: Repository) -> None:
    """raystow does not write such versions, but the format allows them."""
    import numpy as np
    from helpers.builders import write
    from helpers.delta_versions import WORDS
    from helpers.training_versions import halves

    committer = Committer(repository, "me")
    arrays = [{"optimizer.step": WORDS + i} for i in range(4)]
    for id in range(4):
        write(committer, {"optimizer.step": halves(arrays[id]["optimizer.step"])}, base=(id, arrays[id - 1]) if id else None)
    assert bases(repository) == [(), (1,), (2,), (3,)]
    assert compact(repository)
    assert bases(repository) == [(), (), (2,), (3,)]
    for version, one in zip(repository.versions(), arrays, strict=True):
        assert np.array_equal(version.read("optimizer.step"), one["optimizer.step"])
        repository.verify(version)


def test_compaction_keeps_a_thinned_version_thinned(repository: Repository) -> None:
    arrays = star(Committer(repository, "me"))
    repository.plan_retention(Policy(resumable=1)).execute()
    thinned = repository.version(3).record.thinned
    assert compact(repository, 3)
    version = repository.version(3)
    assert (version.record.thinned, version.entry.groups, version.entry.bases) == (thinned, ("weights",), ())
    assert as_it_was(version, arrays)


def newest(repository: Repository) -> None:
    root = repository.root()
    overwrite_root(repository, lambda _: type(root)(**{**vars(root), "versions": root.versions[:2]}))


def verified(repository: Repository) -> None:
    repository.record_verified(repository.version(2))


def leased(repository: Repository) -> None:
    Lease(repository.store, 2, repository.version(2).attempt, repository.clock).renew()


def dropped(repository: Repository) -> None:
    repository.plan_retention(Policy(keep_last=1)).execute()


def compacted(repository: Repository) -> None:
    assert compact(repository)


@pytest.mark.parametrize("event", [newest, verified, leased, dropped, compacted])
def test_compaction_yields_to_a_concurrent_change(
    repository: Repository, clock: FakeClock, event: Callable[[Repository], None]
) -> None:
    star(Committer(repository, "me"))
    plan = replacement.plan(repository, repository.version(2).entry, replacement.compact())
    event(repository)
    before = repository.root().versions
    assert plan.execute() is None
    assert repository.root().versions == before
    clock.time += 4 * 3600
    repository.plan_collection().execute()
    for version in repository.versions():
        repository.verify(version)


def test_a_pinned_version_is_compacted(repository: Repository) -> None:
    star(Committer(repository, "me"))
    repository.pin(repository.version(2), "good")
    assert compact(repository)


def test_the_plan_lists_versions_that_stay_deltas(repository: Repository) -> None:
    star(Committer(repository, "me"))
    verified(repository)
    assert repository.plan_compaction([2, 3, 4]).explain() == [
        "version 2 (step 0): stays a delta: it was verified last",
        "version 3 (step 0): written whole: needs version 1 now",
    ]
    with pytest.raises(StateError, match="there is no version 7"):
        repository.plan_compaction([3, 7])


def test_a_fenced_coordinator_compacts_no_version(repository: Repository) -> None:
    star(committer := Committer(repository, "me"))
    before = repository.root().versions
    Committer(repository, "other")
    with pytest.raises(Fenced):
        repository.plan_compaction().execute(committer.fence)
    assert repository.root().versions == before


def test_a_damaged_base_is_named_and_the_root_is_unchanged(repository: Repository) -> None:
    star(Committer(repository, "me"))
    key = keys.pack(1, repository.version(1).attempt, 0, "weights", 0)
    data = repository.store.get(key, max_bytes=1 << 30)
    repository.store.put(key, [bytes(len(data))])
    before = repository.root().versions
    with pytest.raises(Damaged, match="of version 2 is a delta to it") as caught:
        compact(repository)
    assert caught.value.subject == key
    assert repository.root().versions == before


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_point_loses_no_bit(repository: Repository, store: MemoryStore, clock: FakeClock, *, after: bool) -> None:
    arrays = star(Committer(repository, "me"))
    outcomes = []
    for last in range(1, 99):
        interrupted = Repository(KilledStore(store, last, after=after), repository.id, clock=clock)  # type: ignore[arg-type]
        try:
            compact(interrupted)
        except Killed:
            pass
        version = repository.version(2)
        assert as_it_was(version, arrays)
        repository.verify(version)
        outcomes.append(version.entry.bases)
        collect(repository, clock)
        assert as_it_was(repository.version(2), arrays)
        if not version.entry.bases:
            break
    assert len(outcomes) > 8
    assert outcomes == [(1,)] * (len(outcomes) - 1) + [()]


def test_repair_prefers_the_attempt_without_bases(repository: Repository, clock: FakeClock) -> None:
    arrays = star(Committer(repository, "me"))
    assert compact(repository)
    repository.store.delete([keys.ROOT])
    plan_repair(repository.store, clock).execute()
    assert bases(repository) == [(), (), (1,), ()]
    assert all(as_it_was(version, arrays) for version in repository.versions())
