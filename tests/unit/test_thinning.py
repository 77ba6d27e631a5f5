"""Thinning: what is left has every bit, whatever happens meanwhile and wherever it is cut short."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from handmade import Cut, empty_record, rows_and_pack, whole, write, write_rows

from raystow.storage import key_files, keys, rewriting, thinning
from raystow.storage.committer import Committer
from raystow.storage.derived import Derivation, derive
from raystow.storage.digest import raw_digest
from raystow.storage.errors import Damaged, Fenced, SaveFailed, StoreUnavailable, Untrusted
from raystow.storage.leases import Lease
from raystow.storage.manifest import ARRAY, TENSOR, Chunk, Fragment, Value, path_text
from raystow.storage.object_store import ObjectStore
from raystow.storage.repair import plan_repair
from raystow.storage.repository import Repository
from raystow.storage.retention import Policy
from raystow.storage.root import Root
from raystow.storage.signing import Signer, Trust
from raystow.storage.stores.memory import MemoryStore
from raystow.storage.version import Version
from raystow.storage.version_record import PackInfo

MASTER = np.random.default_rng(0).standard_normal((40, 25), np.float32)
NORM = np.array([np.nan, -0.0, 1.5, np.inf], np.float32)
NORM.view(np.uint32)[0] = 0x7FC0_1234  # a NaN that tells something


def halves(array: np.ndarray) -> Cut:
    rows = array.shape[0] // 2
    return array, [((0, 0), (rows, array.shape[1])), ((rows, 0), (array.shape[0] - rows, array.shape[1]))]


def follows(rows: Iterable[Chunk], name: str, dtype: str) -> list[Chunk]:
    """Rows of a tensor that follows from the one that these are of."""
    return [
        replace(
            row,
            name=name,
            path=path_text((name,)),
            kind=TENSOR,
            dtype=dtype,
            raw_digest=raw_digest(derive(part(row), "float32", dtype)),
            derivation=Derivation(row.name, "float32"),
        )
        for row in rows
    ]


def part(row: Chunk) -> np.ndarray:
    box = tuple(slice(o, o + e) for o, e in zip(row.offset, row.extent, strict=True))
    return np.ascontiguousarray(MASTER[box]).reshape(-1).view(np.uint8)


def mixed(committer: Committer, step: int, *, copy: bool = False) -> Version:
    """A version of two nodes: weights that are their master copy, rounded, under two names; a master copy that lies with them;
    moments apart. ``copy``: a tensor of the weights is a copy of the master."""
    record = replace(empty_record(committer, step), metrics={"loss": 1.0 / step}, world_size=2)
    infos, packs = [], []
    for node in range(2):
        name, tail = ("optimizer.master", ".w"), f".{node}"
        rows, pack = rows_and_pack({"".join(name) + tail: halves(MASTER), "norm" + tail: whole(NORM)})
        rows = [replace(row, kind=TENSOR) for row in rows]
        rows += follows(rows[:2], "model.w" + tail, "bfloat16") + follows(rows[:2], "model.tied" + tail, "bfloat16")
        rows += follows(rows[:2], "model.half" + tail, "float16")
        rows += follows(rows[:2], "ema.w" + tail, "float32") if copy else []
        moments, apart = rows_and_pack({"optimizer.exp_avg" + tail: whole(MASTER * step), "optimizer.none": whole(NORM[:0])})
        empty, _ = rows_and_pack({"empty.a" + tail: whole(NORM[:0]), "empty.b" + tail: whole(NORM[:0])})
        for group, data in (("weights", pack), ("optimizer", apart)):
            committer.repository.store.put(keys.pack(record.id, record.attempt, node, group, 0), [data])
            packs.append(PackInfo(node, group, 0, len(data)))
        moments = [replace(row, group="optimizer") for row in moments[: 2 - node]]  # one empty tensor, in one fragment
        chunks = tuple(replace(row, node=node) for row in [*rows, *empty, *moments])
        values = (
            Value("step", '["step"]', str(step), (node,)),
            Value("optimizer.lr", '["optimizer", "lr"]', "0.1", (node,)),
        )
        fragment = Fragment(node, chunks, values)
        data = fragment.dump()
        committer.repository.store.put(keys.fragment(record.id, record.attempt, node), [data])
        infos.append(fragment.info(data, [node], stall=0.5))
    return committer.commit(replace(record, fragments=tuple(infos), packs=tuple(packs)))


def bits(version: Version) -> dict[str, bytes]:
    """Every tensor, and values."""
    found: dict[str, Any] = {name: version.read(name) for name in version.tensors()}
    tensors = {name: np.asarray(t.view(_words(t)) if hasattr(t, "untyped_storage") else t).tobytes() for name, t in found.items()}
    return tensors | {name: repr(value).encode() for name, value in version.values().items()}


def _words(tensor: Any) -> Any:
    import torch

    return torch.uint8 if tensor.ndim else tensor.dtype


def weights(version: Version) -> dict[str, bytes]:
    return {name: data for name, data in bits(version).items() if not name.startswith("optimizer.")}


@pytest.fixture
def clock() -> FakeClock:
    made = FakeClock()
    made.time = 1e9
    return made


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore("thinning", clock=clock)


@pytest.fixture
def repository(store: MemoryStore, clock: FakeClock) -> Repository:
    made = Repository(store, "0" * 32, clock=clock)
    made.register.create(Root(repository=made.id))
    return made


@pytest.fixture
def committer(repository: Repository) -> Committer:
    made = Committer(repository, "me")
    for step in (1, 2, 3):
        mixed(made, step)
    return made


def thin(repository: Repository, id: int = 1, resumable: int = 2, **how: Any) -> bool:
    return thinning.plan(repository, repository.version(id).entry, resumable).execute(**how) is not None


def collect(repository: Repository, clock: FakeClock) -> None:
    clock.time += 2 * 3600
    repository.plan_collection().execute()
    assert repository.orphans() == []
    assert (repository.root().dropped, repository.root().rewrites) == ((), ())


def test_the_weights_keep_every_bit_and_the_rest_goes(repository: Repository, committer: Committer, clock: FakeClock) -> None:
    before = repository.version(1)
    wanted, rows, record = weights(before), before.chunks, before.record
    clock.time += 100.0
    assert thin(repository)
    after = repository.version(1)
    assert bits(after) == wanted
    assert set(after.tensors()) == {name for name in rows if not name.startswith("optimizer.")}
    assert after.values() == {"step": 1}
    assert repository.verify(after).raw == after.raw < before.raw
    assert after.bytes < before.bytes
    assert after.record == replace(
        record,
        attempt=after.attempt,
        fragments=after.record.fragments,
        packs=after.record.packs,
        thinned=after.record.thinned,
    )
    assert [(f.ranks, f.stall) for f in after.record.fragments] == [(f.ranks, f.stall) for f in record.fragments]
    told = after.record.thinned
    assert told is not None
    assert (told.attempt, told.at, told.groups) == (before.attempt, clock.time, ("weights",))
    assert [entry.groups for entry in repository.root().versions] == [("weights",), (), ()]
    assert [(d.id, d.attempt, d.at) for d in repository.root().dropped] == [(1, before.attempt, clock.time)]
    assert bits(before) != wanted, "who had found it before can still read it"
    collect(repository, clock)
    assert bits(repository.version(1)) == wanted
    assert [row.box for row in after.chunks["model.w.0"]] == [row.box for row in rows["model.w.0"]]


def test_what_can_be_copied_is_and_what_is_alike_is_stored_once(repository: Repository, committer: Committer) -> None:
    before = repository.version(1).chunks
    assert thin(repository)
    after = repository.version(1).chunks
    assert [row.stored_digest for row in after["norm.1"]] == [row.stored_digest for row in before["norm.1"]]
    tied = {name: [row.derivation for row in after[name]] for name in ("model.w.0", "model.tied.0", "model.half.0")}
    assert tied["model.half.0"] == [None, None]
    assert {repr(tied["model.w.0"]), repr(tied["model.tied.0"])} >= {"[None, None]"}
    assert sum(row.stored for name in ("model.w.0", "model.tied.0") for row in after[name]) <= MASTER.size * 2


def test_a_copy_of_what_goes_takes_over_its_bytes(repository: Repository) -> None:
    committer = Committer(repository, "me")
    before = mixed(committer, 1, copy=True)
    mixed(committer, 2)
    digests = [row.stored_digest for row in before.chunks["optimizer.master.w.0"]]
    assert thin(repository, resumable=1)
    after = repository.version(1)
    assert weights(before) == bits(after)
    for name in ("ema.w.0", "model.w.0", "model.half.0"):
        assert [row.stored_digest for row in after.chunks[name]] == digests
    assert [row.derivation for row in after.chunks["ema.w.0"]] == [None, None]
    repository.verify(after)


@pytest.mark.parametrize("size", [1, 3000, 9000])
def test_packs_of_any_size(repository: Repository, committer: Committer, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "_PACK", size)
    wanted = weights(repository.version(1))
    plan = thinning.plan(repository, repository.version(1).entry, 1).rewriting
    read: list[int] = []
    assert thin(repository, progress=read.append)
    after = repository.version(1)
    assert bits(after) == wanted
    repository.verify(after)
    assert len(after.record.packs) >= 2
    assert sum(read) == plan.read
    assert after.bytes <= plan.stored


def test_what_holds_weights_only_is_left_as_it_is(repository: Repository, committer: Committer) -> None:
    assert thin(repository)
    once = repository.version(1)
    assert not thinning.plan(repository, once.entry, 1).needed
    plan = repository.plan_retention(Policy(resumable=1))
    assert [entry.id for entry in plan.thinned] == [2]


# What happens meanwhile


def pinned(repository: Repository) -> None:
    repository.pin(repository.version(1), "good")


def verified(repository: Repository) -> None:
    repository.record_verified(repository.version(1))


def leased(repository: Repository) -> None:
    Lease(repository.store, 1, repository.version(1).attempt, repository.clock).renew()


def dropped(repository: Repository) -> None:
    repository.plan_retention(Policy(keep_last=2)).execute()


def newest_again(repository: Repository) -> None:
    for id in (2, 3):
        repository.pin(repository.version(1), "stays")
        thin(repository, id, 1)
        repository.unpin("stays")
    root = repository.root()
    repository.register.update(lambda _: replace(root, versions=root.versions[:1] + root.versions[2:]))


def thinned(repository: Repository) -> None:
    assert thin(repository)


BEFORE = [(event, False) for event in (pinned, verified, leased, dropped, newest_again, thinned)]
DURING = [(event, True) for event in (pinned, verified, leased, newest_again)]  # retention and others who thin see its lease


@pytest.mark.parametrize(("event", "during"), BEFORE + DURING)
def test_it_gives_way(
    repository: Repository, committer: Committer, clock: FakeClock, event: Callable[[Repository], None], during: bool
) -> None:
    plan = thinning.plan(repository, repository.version(1).entry, 2)
    happened: list[dict[str, dict[str, bytes]]] = []

    def happens(nbytes: int = 0) -> None:
        if not happened:
            happened.append({})
            event(repository)
            happened[0] |= {str(v.entry): weights(v) for v in repository.versions()}

    if not during:
        happens()
    assert plan.execute(progress=happens) is None
    assert {str(v.entry): weights(v) for v in repository.versions()} == happened[0]
    clock.time += 4 * 3600
    repository.plan_collection().execute()
    for version in repository.versions():
        repository.verify(version)


def test_a_coordinator_that_is_fenced_thins_nothing(repository: Repository, committer: Committer) -> None:
    before = repository.root().versions
    Committer(repository, "other")
    with pytest.raises(Fenced):
        thin(repository, check=committer.check)
    assert repository.root().versions == before


def test_a_collection_leaves_it_alone_while_it_writes(repository: Repository, committer: Committer, clock: FakeClock) -> None:
    wanted = weights(repository.version(1))

    def collecting(nbytes: int) -> None:
        clock.time += 200.0
        plan = repository.plan_collection()
        assert not plan.due
        plan.execute()

    assert thin(repository, progress=collecting)
    assert bits(repository.version(1)) == wanted


def test_one_that_was_thought_dead_is_collected_and_comes_too_late(
    repository: Repository, committer: Committer, clock: FakeClock
) -> None:
    wanted = bits(repository.version(1))

    def frozen(nbytes: int) -> None:
        if not repository.root().dropped:
            clock.time += 7200.0
            repository.plan_collection().execute()

    assert not thin(repository, progress=frozen)
    assert bits(repository.version(1)) == wanted
    collect(repository, clock)


def test_one_that_died_before_it_wrote_is_struck_out(repository: Repository, committer: Committer, clock: FakeClock) -> None:
    plan = thinning.plan(repository, repository.version(1).entry, 2)
    assert plan._noted(lambda root: None) is not None
    (garbage,) = repository.plan_collection().garbage
    assert garbage.kept
    collect(repository, clock)
    assert not repository.root().rewrites


# Killed


class Killed(BaseException):
    pass


class Mortal:
    """A store whose user dies before its ``last``-th change, or just after it."""

    def __init__(self, store: ObjectStore, last: int, *, after: bool) -> None:
        self._store, self.left, self._after = store, last, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in ("put", "put_if", "delete"):
            return method

        def change(*args: Any) -> Any:
            self.left -= 1
            if self.left < 0 or (self.left == 0 and not self._after):
                raise Killed
            found = method(*args)
            if self.left == 0:
                raise Killed
            return found

        return change


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_point_it_is_as_it_was_or_thin(
    repository: Repository, committer: Committer, store: MemoryStore, clock: FakeClock, *, after: bool
) -> None:
    full, light = bits(repository.version(1)), weights(repository.version(1))
    outcomes = []
    for last in range(1, 99):
        mortal = Repository(Mortal(store, last, after=after), repository.id, clock=clock)  # type: ignore[arg-type]
        plan = thinning.plan(mortal, repository.version(1).entry, 2)
        try:
            plan.execute()
        except Killed:
            pass
        version = repository.version(1)
        found = bits(version)
        assert found == (full if version.entry.resumable else light)
        repository.verify(version)
        outcomes.append(version.entry.resumable)
        collect(repository, clock)
        repository.verify(version)
        if not version.entry.resumable:
            break
    assert len(outcomes) > 8
    assert outcomes == [True] * (len(outcomes) - 1) + [False]


def test_a_swap_without_an_answer_is_settled_by_reading_back(repository: Repository, committer: Committer) -> None:
    class Forgetful:
        def __init__(self, store: ObjectStore) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def put_if(self, key: str, data: bytes, tag: str | None) -> str:
            self._store.put_if(key, data, tag)
            raise StoreUnavailable("no answer", subject=key)

    forgetful = Repository(Forgetful(repository.store), repository.id, clock=repository.clock)  # type: ignore[arg-type]
    assert thin(forgetful)
    assert not repository.version(1).entry.resumable


def test_damaged_weights_stay_where_they_are(repository: Repository, committer: Committer) -> None:
    version = repository.version(1)
    for group, fails in (("optimizer", False), ("weights", True)):
        key = keys.pack(1, version.attempt, 1, group, 0)
        data = repository.store.get(key, max_bytes=1 << 20)
        repository.store.put(key, [bytes([data[0] ^ 1]) + data[1:]])
        if fails:
            with pytest.raises(Damaged, match="weights-00001"):
                thin(repository)
    assert repository.version(1) == version


# Differences

WORDS = np.random.default_rng(1).integers(0, 1 << 30, (4, 20000), np.int32)


def star(committer: Committer) -> list[dict[str, np.ndarray]]:
    """A whole version, two that are differences to it, and a whole one. The weights of the second follow from its master copy."""
    arrays = [{"optimizer.step": WORDS + i, "model.ids": WORDS[:1] * 3 + i} for i in range(4)]
    for i, one in enumerate(arrays):
        base = (1, arrays[0]) if i in (1, 2) else None
        rows, pack = rows_and_pack({name: halves(array) for name, array in one.items()}, base)
        rows = [replace(row, kind=TENSOR) for row in rows]
        for row in rows[:2]:
            derived = Derivation(row.name, row.dtype)
            rows.append(replace(row, name="model.step", path='["model", "step"]', derivation=derived))
        assert write_rows(committer, rows, pack).entry.bases == ((1,) if base else ())
    return arrays


def as_it_was(version: Version, arrays: list[dict[str, np.ndarray]]) -> bool:
    one = arrays[version.id - 1]
    wanted = {"model.ids": one["model.ids"], "model.step": one["optimizer.step"]}
    if version.resumable:
        wanted |= {"optimizer.step": one["optimizer.step"]}
    return version.tensors().keys() == wanted.keys() and all(
        np.array_equal(np.asarray(version.read(name)), array) for name, array in wanted.items()
    )


def test_what_was_a_difference_stays_one(repository: Repository) -> None:
    arrays = star(Committer(repository, "me"))
    plan = repository.plan_retention(Policy(resumable=1))
    assert [entry.id for entry in plan.thinned] == [3, 2, 1]
    plan.execute()
    for version in repository.versions():
        repository.verify(version)
        assert as_it_was(version, arrays)
    assert [(v.resumable, v.entry.bases) for v in repository.versions()] == [
        (False, ()),
        (False, (1,)),
        (False, (1,)),
        (True, ()),
    ]
    assert repository.version(2).bytes < repository.version(1).bytes / 3
    assert [row.coding.base for row in repository.version(2).chunks["model.step"]] == [1, 1], "coded anew"
    assert not repository.plan_retention(Policy(resumable=1)).thinned


def test_a_base_is_not_thinned_before_what_needs_it(repository: Repository) -> None:
    arrays = star(committer := Committer(repository, "me"))
    assert not thin(repository, 1, 1)
    repository.pin(repository.version(2), "good")
    plan = repository.plan_retention(Policy(resumable=1))
    assert [decision.why for decision in plan.decisions] == [
        "no rule drops it, base of version 3 and 1 more",
        "pinned as good",
        "no rule drops it; older than the last 1 resumable",
        "newest",
    ]
    plan.execute()
    assert [version.resumable for version in repository.versions()] == [True, True, False, True]
    repository.unpin("good")
    repository.plan_retention(Policy(resumable=1)).execute()
    assert [version.resumable for version in repository.versions()] == [False, False, False, True]
    assert all(as_it_was(version, arrays) for version in repository.versions())
    with pytest.raises(SaveFailed, match="difference to version 1"):
        write(committer, {"optimizer.step": halves(WORDS)}, base=(1, arrays[0]))


def test_what_is_kept_for_others_alone_is_thinned_with_them(repository: Repository) -> None:
    arrays = star(Committer(repository, "me"))
    repository.plan_retention(Policy(keep_last=3, resumable=1)).execute()
    assert [version.resumable for version in repository.versions()] == [False, False, False, True]
    assert all(as_it_was(version, arrays) for version in repository.versions())


def test_repair_takes_what_is_left_of_a_version_whose_base_is_not_all_there(repository: Repository, clock: FakeClock) -> None:
    arrays = star(Committer(repository, "me"))
    first = repository.version(1)
    repository.plan_retention(Policy(resumable=1)).execute()
    repository.store.delete([first.record_key])  # a collection began with the oldest
    repository.store.delete([keys.ROOT])
    plan_repair(repository.store, clock).execute()
    assert [version.resumable for version in repository.versions()] == [False, False, False, True]
    assert all(as_it_was(version, arrays) for version in repository.versions())


# A lost root


@pytest.mark.parametrize("swapped", [False, True])
def test_of_a_version_and_what_is_left_of_it_repair_brings_back_all_of_it(
    repository: Repository, committer: Committer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, *, swapped: bool
) -> None:
    full, light = bits(repository.version(1)), weights(repository.version(1))
    if not swapped:
        monkeypatch.setattr(thinning.Thinning, "_swapped", lambda *_: False)
    assert thin(repository) is swapped
    repository.store.delete([keys.ROOT])
    plan_repair(repository.store, clock).execute()
    assert bits(repository.version(1)) == full
    if swapped:
        repository.store.delete([repository.version(1).record_key])  # as a collection begins
        repository.store.delete([keys.ROOT])
        plan_repair(repository.store, clock).execute()
        assert bits(repository.version(1)) == light
        assert not repository.version(1).entry.resumable


# Signatures


@pytest.fixture
def signer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    key_files.write_pair(tmp_path / "key")
    monkeypatch.delenv(key_files.TRUSTED_KEYS, raising=False)
    monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "key"))
    made = key_files.signer()
    assert made is not None
    return made


@pytest.mark.parametrize("asked", [False, True])
def test_what_was_signed_stays_signed(
    repository: Repository, signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, asked: bool
) -> None:
    if asked:
        repository = Repository(repository.store, repository.id, clock=repository.clock, signed_by=(signer.public,))
    committer = Committer(repository, "me", signer)
    for step in (1, 2, 3):
        mixed(committer, step)
    for path in (None, tmp_path / "other"):
        with monkeypatch.context() as patch:
            if path is None:
                patch.delenv(key_files.SIGNING_KEY)
            else:
                key_files.write_pair(path)
                patch.setenv(key_files.SIGNING_KEY, str(path))
            with pytest.raises(Untrusted):
                thin(repository)
    assert thin(repository)
    reader = Repository(repository.store, repository.id, trust=Trust((signer.public,)))
    assert reader.version(1).record.thinned is not None


def test_what_nobody_has_signed_does_not_become_so(repository: Repository, committer: Committer, signer: Signer) -> None:
    assert thin(repository)
    version = repository.version(1)
    assert not list(repository.store.list(keys.signature(1, version.attempt)))


def test_a_kind_that_is_no_tensor_is_copied() -> None:
    """Only tensors are derived; arrays and scalars have bytes of their own."""
    rows, _ = rows_and_pack({"a": whole(NORM)})
    assert rows[0].kind == ARRAY
    (bundle,) = rewriting._bundles(rows)
    assert (bundle.source, bundle.nbytes, math.prod(bundle.rows[0].extent)) == (None, NORM.nbytes, NORM.size)
