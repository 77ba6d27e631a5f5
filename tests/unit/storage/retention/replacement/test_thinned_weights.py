"""Thinning: the remaining tensors keep every bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers.builders import rows_and_pack, whole
from helpers.fake_clock import FakeClock
from helpers.training_versions import MASTER, NORM, bits, collect, mixed, thin, weights

from raystow.storage.commit.committer import Committer
from raystow.storage.format.manifest import ARRAY
from raystow.storage.repository import Repository
from raystow.storage.retention import replacement, rewrite
from raystow.storage.retention.policy import Policy


def test_thinning_keeps_exact_weights_and_removes_the_rest(
    repository: Repository, committer: Committer, clock: FakeClock
) -> None:
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
        saved=before.attempt,
        fragments=after.record.fragments,
        packs=None,
        thinned=after.record.thinned,
    )
    assert [(f.ranks, f.stall) for f in after.record.fragments] == [(f.ranks, f.stall) for f in record.fragments]
    told = after.record.thinned
    assert told is not None
    assert (told.attempt, told.at, told.groups) == (before.attempt, clock.time, ("weights",))
    assert [entry.groups for entry in repository.root().versions] == [("weights",), (), ()]
    assert [(d.id, d.attempt, d.at) for d in repository.root().dropped] == [(1, before.attempt, clock.time)]
    assert bits(before) != wanted, "the replaced attempt is still readable"
    collect(repository, clock)
    assert bits(repository.version(1)) == wanted
    assert [row.box for row in after.chunks["model.w.0"]] == [row.box for row in rows["model.w.0"]]


def test_chunks_are_copied_and_equal_tensors_stored_once(repository: Repository, committer: Committer) -> None:
    before = repository.version(1).chunks
    assert thin(repository)
    after = repository.version(1).chunks
    assert [row.stored_digest for row in after["norm.1"]] == [row.stored_digest for row in before["norm.1"]]
    tied = {name: [row.derivation for row in after[name]] for name in ("model.w.0", "model.tied.0", "model.half.0")}
    assert tied["model.half.0"] == [None, None]
    assert {repr(tied["model.w.0"]), repr(tied["model.tied.0"])} >= {"[None, None]"}
    assert sum(row.stored for name in ("model.w.0", "model.tied.0") for row in after[name]) <= MASTER.size * 2


def test_a_copy_keeps_the_bytes_of_its_removed_source(repository: Repository) -> None:
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
def test_thinning_writes_packs_of_any_size(
    repository: Repository, committer: Committer, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "PACK_BYTES", size)
    wanted = weights(repository.version(1))
    plan = replacement.plan(repository, repository.version(1).entry, replacement.thin(1)).rewriting
    read: list[int] = []
    assert thin(repository, progress=read.append)
    after = repository.version(1)
    assert bits(after) == wanted
    repository.verify(after)
    assert after.record.pack_count == len([*after.packs]) >= 2
    assert sum(read) == plan.read
    assert after.bytes <= plan.stored


def test_a_weights_only_version_is_not_thinned_again(repository: Repository, committer: Committer) -> None:
    assert thin(repository)
    once = repository.version(1)
    assert not replacement.plan(repository, once.entry, replacement.thin(1)).needed
    plan = repository.plan_retention(Policy(resumable=1))
    assert [entry.id for entry in plan.thinned] == [2]


def test_arrays_are_copied_as_stored() -> None:
    """Only tensors are derived; arrays and scalars have their own bytes."""
    rows, _ = rows_and_pack({"a": whole(NORM)})
    assert rows[0].kind == ARRAY
    (bundle,) = rewrite.bundles(rows)
    assert (bundle.source, bundle.nbytes, math.prod(bundle.rows[0].extent)) == (None, NORM.nbytes, NORM.size)
