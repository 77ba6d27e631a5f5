"""Retention with fewer mantissa bits: each thinned version has the saved weights, rounded once, whatever happens concurrently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.builders import rows_and_pack, write_rows
from helpers.fake_clock import FakeClock
from helpers.killed_store import Killed, KilledStore
from helpers.scripted_store import script, unscript
from helpers.training_versions import collect, halves, whole
from helpers.weight_history import bases, weights
from msgspec import structs

from raystow.storage.checks.repair import plan_repair
from raystow.storage.coding.derived import Derivation, derive
from raystow.storage.coding.digest import raw_digest
from raystow.storage.coding.nearest import round_to_nearest
from raystow.storage.coding.rounded import Rounded
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import StateError
from raystow.storage.format import keys
from raystow.storage.format.manifest import TENSOR, Chunk
from raystow.storage.repository import Repository
from raystow.storage.retention import replacement
from raystow.storage.retention.policy import Policy
from raystow.storage.stores.memory import MemoryStore

ROUNDED = Policy(resumable=1, delta=3, mantissa_bits=4)
DTYPES = {"model.w": "bfloat16", "model.tied": "bfloat16", "model.full": "float32", "model.same": "float32"}
SOURCES = {"model.w": "optimizer.w", "model.tied": "optimizer.w", "model.same": "model.full"}
KEPT = ("model.norm", "model.small", "model.ids")
"""A vector, a small matrix, and integers: their bits are never reduced."""


def master_and_copies(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    master = random.standard_normal((200, 200), np.float32)
    for _ in range(step):
        master = (master * (1 + random.normal(0, 0.01, master.shape))).astype(np.float32)
    kept = {"model.norm": master[:10].reshape(-1), "model.small": master[:2, :200], "model.ids": master.view(np.int32)[:20]}
    return {"optimizer.w": master, "model.full": master * np.float32(1.5), **kept}


def follows(row: Chunk, part: np.ndarray, name: str) -> Chunk:
    made = derive(np.ascontiguousarray(part).reshape(-1).view(np.uint8), "float32", DTYPES[name])
    return structs.replace(
        row, name=name, dtype=DTYPES[name], raw_digest=raw_digest(made), derivation=Derivation(row.name, row.dtype)
    )


def train(committer: Committer, count: int, *, star: bool = False) -> list[dict[str, bytes]]:
    """Commit ``count`` versions. Return for each version its weights, rounded to four mantissa bits. Two names of bfloat16
    weights are derived from their float32 master weights; one name of float32 weights is derived from another float32 tensor.
    With ``star``, each later version is a delta to version 1.
    """
    found = []
    for step in range(1, count + 1):
        arrays = master_and_copies(step)
        base = (1, master_and_copies(1)) if star and step > 1 else None
        cut = {name: halves(a) if name in ("optimizer.w", "model.full") else whole(a) for name, a in arrays.items()}
        rows, pack = rows_and_pack(cut, base)
        rows = [structs.replace(row, kind=TENSOR) for row in rows]
        for name, source in SOURCES.items():
            own = [row for row in rows if row.name == source]
            rows += [follows(row, part, name) for row, part in zip(own, np.split(arrays[source], 2), strict=True)]
        version = write_rows(committer, [structs.replace(row, path=f'["{row.name}"]') for row in rows], pack)
        found.append({name: rounded(name, data) for name, data in weights(version).items()})
    return found


def rounded(name: str, data: bytes) -> bytes:
    raw = np.frombuffer(data, np.uint8).copy()
    if name in DTYPES:
        round_to_nearest(raw, DTYPES[name], 4)
    return raw.tobytes()


def check(repository: Repository, wanted: list[dict[str, bytes]]) -> None:
    for version in repository.versions():
        repository.verify(version)
        found = weights(version)
        assert {name: rounded(name, data) for name, data in found.items()} == wanted[version.id - 1]
        assert version.resumable or found == wanted[version.id - 1]


def test_rounded_weights_become_deltas_to_rounded_ones(repository: Repository, clock: FakeClock) -> None:
    wanted = train(Committer(repository, "me"), 6)
    exact = weights(repository.version(1))
    plan = repository.plan_retention(ROUNDED)
    older = "no rule drops it; older than the last 1 resumable"
    assert [decision.why for decision in plan.decisions[:2]] == [
        f"{older}, 4 bits of mantissa",
        f"{older}, as a delta to version 1, 4 bits of mantissa",
    ]
    likely = plan.replacement(plan.decisions[0].entry).stored
    plan.execute()
    assert bases(repository) == [(), (1,), (2,), (3,), (), ()]
    check(repository, wanted)
    collect(repository, clock)
    check(repository, wanted)
    found = weights(repository.version(1))
    assert all(found[name] == exact[name] for name in KEPT)
    assert all(found[name] != exact[name] for name in DTYPES)
    told = repository.version(2).rounded()
    assert told.keys() == DTYPES.keys()
    assert all(one.rule == "NearestBits(4)" and 0 < one.relative <= 2**-5 for one in told.values())
    assert likely == pytest.approx(repository.version(1).bytes, rel=0.2)
    assert not repository.plan_retention(replace(ROUNDED, mantissa_bits=2)).thinned, "never twice"


def test_rounded_versions_need_less_space(repository: Repository, store: MemoryStore, clock: FakeClock) -> None:
    sizes = []
    for policy in (Policy(resumable=1, delta=3), ROUNDED, Policy(resumable=1, mantissa_bits=4)):
        one = Repository(MemoryStore("one", clock=clock), repository.id, clock=clock)
        one.register.create(repository.root())
        train(Committer(one, "me"), 3)
        one.plan_retention(policy).execute()
        sizes.append([version.bytes for version in one.versions()[:2]])
    (whole, difference), (rounded_whole, rounded_difference), alone = sizes
    assert rounded_whole < 0.75 * whole
    assert rounded_difference < 0.75 * difference
    assert alone[0] == rounded_whole == pytest.approx(alone[1], rel=0.02)


def test_deltas_to_one_base_become_a_delta_chain(repository: Repository, clock: FakeClock) -> None:
    """Each delta is written as a whole version before its base is rounded."""
    wanted = train(Committer(repository, "me"), 4, star=True) + train_one_more(repository)
    repository.plan_retention(ROUNDED).execute()
    assert bases(repository) == [(), (1,), (2,), (3,), ()]
    collect(repository, clock)
    check(repository, wanted)


def test_a_needed_base_is_rounded_once_no_version_needs_it(repository: Repository, clock: FakeClock) -> None:
    wanted = train(Committer(repository, "me"), 5, star=True)
    assert bases(repository) == [(), (1,), (1,), (1,), (1,)]
    repository.plan_retention(ROUNDED).execute()
    assert [version.resumable for version in repository.versions()] == [True, False, False, False, True], "the last one needs it"
    assert bases(repository) == [(), (), (2,), (3,), (1,)]
    check(repository, wanted)
    collect(repository, clock)
    wanted += train_one_more(repository)
    repository.plan_retention(ROUNDED).execute()
    assert bases(repository) == [(), (), (2,), (3,), (4,), ()]
    check(repository, wanted)
    collect(repository, clock)
    check(repository, wanted)


def train_one_more(repository: Repository) -> list[dict[str, bytes]]:
    """Commit a whole version; no version needs version 1 as its base afterwards."""
    arrays = {"optimizer.w": master_and_copies(9)["optimizer.w"]}
    rows, pack = rows_and_pack({name: whole(array) for name, array in arrays.items()})
    write_rows(Committer(repository, "me"), [structs.replace(row, kind=TENSOR) for row in rows], pack)
    return [{}]


def test_the_base_of_a_thinned_version_keeps_all_bits(repository: Repository) -> None:
    """Version 2 was thinned earlier by a policy without rounding."""
    train(Committer(repository, "me"), 4, star=True)
    repository.plan_retention(Policy(resumable=2)).execute()
    assert bases(repository) == [(), (1,), (1,), (1,)]
    before = [weights(version) for version in repository.versions()]
    train_one_more(repository)
    plan = repository.plan_retention(ROUNDED)
    assert {decision.entry.id: decision.mantissa_bits for decision in plan.decisions} == {1: None, 2: None, 3: 4, 4: 4, 5: None}
    plan.execute()
    after = [weights(version) for version in repository.versions()]
    assert after[:2] == before[:2]
    assert after[2:4] != before[2:4]
    for version in repository.versions():
        repository.verify(version)


def test_a_version_is_not_rounded_if_it_becomes_a_delta_base(repository: Repository) -> None:
    train(Committer(repository, "me"), 2, star=True)
    train_one_more(repository)
    plan = repository.plan_retention(Policy(resumable=1, mantissa_bits=4))
    second, first = (plan.replacement(entry) for entry in plan.thinned)
    assert (first.version.id, first.goal.bits) == (1, 4)
    replacement.plan(repository, second.version.entry, replacement.thin(1)).execute()
    assert bases(repository) == [(), (1,), ()]
    before = weights(repository.version(2))
    assert first.execute() is None
    assert weights(repository.version(2)) == before


def test_no_delta_is_made_to_a_concurrently_rounded_base(repository: Repository) -> None:
    """A concurrent prune rounds the base directly before the swap."""
    wanted = train(Committer(repository, "me"), 3)
    exact = weights(repository.version(2))
    plan = repository.plan_retention(Policy(resumable=1, delta=3))
    second, first = (plan.replacement(entry) for entry in plan.thinned)
    assert (second.rewriting.base or second.version).id == first.version.id == 1
    others = repository.plan_retention(Policy(resumable=1, mantissa_bits=4))
    steps = iter(["noted", "swapped"])

    put_if = repository.store.put_if

    def meanwhile(*swap: Any) -> str:
        if next(steps, None) == "swapped":
            assert others.replacement(others.thinned[-1]).execute() is not None
        return put_if(*swap)

    script(repository.store, put_if=meanwhile)
    assert second.execute() is None
    assert next(steps, None) is None
    assert bases(repository) == [(), (), ()]
    assert weights(repository.version(1)) == wanted[0]
    assert weights(repository.version(2)) == exact


@pytest.mark.parametrize("change", ["pinned", "dropped"])
def test_a_version_pinned_or_dropped_meanwhile_gets_no_delta(repository: Repository, change: str) -> None:
    wanted = train(Committer(repository, "me"), 3)
    plan = repository.plan_retention(ROUNDED)
    second, first = (plan.replacement(entry) for entry in plan.thinned)
    assert (first.version.id, first.goal.users) == (1, (2,))
    alone = second.execute()
    if change == "pinned":
        repository.pin(repository.version(2), "good")
    else:
        now = repository.plan_retention(Policy())
        replace(now, decisions=tuple(replace(one, keep=one.entry.id != 2) for one in now.decisions)).drop()
    assert first.execute() is not None
    entries = {entry.id: entry for entry in repository.root().versions}
    assert entries.get(2) == (alone if change == "pinned" else None)
    check(repository, wanted)


def test_a_failed_delta_leaves_a_whole_rounded_version(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    train(Committer(repository, "me"), 3)
    plan = repository.plan_retention(ROUNDED)
    second, first = (plan.replacement(entry) for entry in plan.thinned)
    whole = second.execute()
    assert whole is not None
    (pack,) = repository.version(2).packs
    repository.store.put(keys.pack(2, whole.attempt, *pack.place), [bytes(pack.size)])
    assert first.execute() is not None
    assert bases(repository) == [(), (), ()]
    assert "version 2 stays whole, and is no delta to version 1" in caplog.text
    repository.verify(repository.version(1))


def test_weights_rounded_by_a_save_are_not_rounded_again(repository: Repository) -> None:
    weight = master_and_copies(1)["optimizer.w"]
    rows, pack = rows_and_pack({"model.w": halves(weight), "optimizer.exp_avg": halves(weight * 3)})
    told = {"model.w": Rounded("MantissaBits(9)", 0.1, 0.1, 1.0, 0.1, 5)}
    committer = Committer(repository, "me")
    version = write_rows(committer, [structs.replace(row, kind=TENSOR) for row in rows], pack, rounded=told)
    before = weights(version)
    train_one_more(repository)
    repository.plan_retention(ROUNDED).execute()
    assert not repository.version(1).resumable
    assert weights(repository.version(1)) == before
    assert repository.version(1).rounded() == told


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_point_leaves_exact_or_rounded_weights(
    repository: Repository, store: MemoryStore, clock: FakeClock, *, after: bool
) -> None:
    wanted = train(Committer(repository, "me"), 4, star=False)
    for last in range(1, 199):
        interrupted = Repository(KilledStore(store, last, after=after), repository.id, clock=clock)  # type: ignore[arg-type]
        try:
            interrupted.plan_retention(ROUNDED).execute()
        except Killed:
            pass
        check(repository, wanted)
        collect(repository, clock)
        check(repository, wanted)
        if not any(version.resumable for version in repository.versions()[:3]):
            break
    assert last > 4


@pytest.mark.parametrize("collected", [(), (2,), (1, 2, 3)])
def test_repair_restores_attempts_that_match_their_bases(repository: Repository, collected: tuple[int, ...]) -> None:
    """``collected``: ids of the versions whose earlier attempts were collected."""
    wanted = train(Committer(repository, "me"), 4)
    before = [version.attempt for version in repository.versions()]
    repository.plan_retention(ROUNDED).execute()
    now = [version.attempt for version in repository.versions()]
    store = repository.store
    for id in range(1, 5):  # delete the rounded whole attempts that were replaced by deltas
        kept = {now[id - 1], *(() if id in collected else (before[id - 1],))}
        here = [info.key for info in store.list(keys.VERSIONS) if f"/{id:08d}-" in info.key]
        store.delete([key for key in here if not any(attempt in key for attempt in kept)])
    store.delete([keys.ROOT])
    plan_repair(store, repository.clock).execute()
    back = [version.attempt for version in repository.versions()]
    check(repository, wanted)
    full = {(): [True] * 4, (2,): [False, False, True, True], (1, 2, 3): [False, False, False, True]}[collected]
    assert [a == b for a, b in zip(back, before, strict=True)] == full


def lose(repository: Repository, *attempts: str) -> list[str]:
    """Delete the root and all objects of these attempts, repair the repository, and return the explanation of the repair."""
    store = repository.store
    store.delete([info.key for info in store.list(keys.VERSIONS) if any(attempt in info.key for attempt in attempts)])
    store.delete([keys.ROOT])
    plan = plan_repair(store, repository.clock)
    plan.execute()
    return plan.explain()


def test_repair_ignores_a_rounding_that_was_not_committed(repository: Repository) -> None:
    """The process is killed before the swap. Later versions become deltas to the attempt that was not replaced."""
    train(Committer(repository, "me"), 4)
    saved = [version.attempt for version in repository.versions()]
    plan = repository.plan_retention(Policy(resumable=2, mantissa_bits=4))
    steps = iter(["noted", "swapped"])

    put_if = repository.store.put_if

    def killed(*swap: Any) -> str:
        if next(steps) == "swapped":
            raise Killed
        return put_if(*swap)

    script(repository.store, put_if=killed)
    with pytest.raises(Killed):
        plan.replacement(plan.thinned[0]).execute()
    unscript(repository.store)
    repository.plan_retention(Policy(resumable=2, delta=3)).execute()
    train_one_more(repository)
    repository.plan_retention(replace(ROUNDED, resumable=2)).execute()
    assert bases(repository) == [(), (1,), (2,), (), ()]
    assert [version.record.bits for version in repository.versions()] == [None, None, 4, None, None]
    before = [weights(version) for version in repository.versions()]
    told = "\n".join(lose(repository, *saved[:3]))
    assert "the id belongs to attempt" in told, "the killed attempt is complete in the store"
    assert [weights(version) for version in repository.versions()] == before


@pytest.mark.parametrize("token", ["0" * 16, "f" * 16])
def test_repair_restores_the_committed_one_of_two_roundings(
    repository: Repository, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """The other rounding was killed and had another number of bits. ``token`` is its attempt token: it sorts before or after
    the committed one.
    """
    train(Committer(repository, "me"), 3)
    plan = repository.plan_retention(Policy(resumable=2, mantissa_bits=3))
    steps = iter(["noted", "swapped"])

    put_if = repository.store.put_if

    def killed(*swap: Any) -> str:
        if next(steps) == "swapped":
            raise Killed
        return put_if(*swap)

    rounding = plan.replacement(plan.thinned[0])
    with monkeypatch.context() as patch:
        patch.setattr(clock, "token", lambda: token)
        script(repository.store, put_if=killed)
        with pytest.raises(Killed):
            rounding.execute()
        unscript(repository.store)
    repository.plan_retention(ROUNDED).execute()
    assert bases(repository) == [(), (1,), ()]
    before = [weights(version) for version in repository.versions()]
    clock.time += 2 * 3600
    repository.plan_collection(dropped_only=True).execute()
    assert any("the id belongs to attempt" in line for line in lose(repository))
    assert [weights(version) for version in repository.versions()] == before


def test_a_weights_only_version_is_thinned_once(repository: Repository) -> None:
    committer = Committer(repository, "me")
    for step in range(1, 6):
        rows, pack = rows_and_pack({"model.full": halves(master_and_copies(step)["model.full"])})
        write_rows(committer, [structs.replace(row, kind=TENSOR) for row in rows], pack)
    size = repository.version(1).bytes
    repository.plan_retention(ROUNDED).execute()
    assert [version.resumable for version in repository.versions()] == [False] * 4 + [True]
    assert bases(repository) == [(), (1,), (2,), (3,), ()]
    assert not repository.plan_retention(ROUNDED).thinned
    for _ in range(2):
        repository.plan_retention(replace(ROUNDED, max_bytes=2 * size)).execute()
    assert sum(version.bytes for version in repository.versions()) <= 2 * size


def test_repair_omits_deltas_whose_rounded_base_is_lost(repository: Repository) -> None:
    wanted = train(Committer(repository, "me"), 3)
    first, _, last = (version.attempt for version in repository.versions())
    repository.plan_retention(ROUNDED).execute()
    assert bases(repository) == [(), (1,), ()]
    there = {found[1] for info in repository.store.list(keys.VERSIONS) if (found := keys.attempt_of(info.key)) is not None}
    told = lose(repository, *there - {first, repository.version(2).attempt, last})
    assert any("which does not come back as it was" in line for line in told)
    assert [version.id for version in repository.versions()] == [1, 3]
    check(repository, wanted)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({"mantissa_bits": 4}, "resumable="),
        ({"resumable": 1, "mantissa_bits": 52}, "less than 52"),
        ({"resumable": 1, "mantissa_bits": 0}, "mantissa_bits is 0"),
    ],
)
def test_invalid_policies_raise_state_error(policy: dict[str, int], told: str) -> None:
    with pytest.raises(StateError) as caught:
        Policy(**policy)
    assert told in f"{caught.value} {caught.value.remedy}"
