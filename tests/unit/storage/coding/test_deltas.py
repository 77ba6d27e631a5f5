"""Delta chunks: encoding, reads through chains, restore plans, verification, and detection of damage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from helpers.builders import Cut, memory_repository, overwrite_root, rows_and_pack, whole, write, write_rows
from helpers.packs import flip, pack_key
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import raystow
from raystow.orchestrator.restore.planner import plan_restore
from raystow.orchestrator.restore.what_if import plan_world
from raystow.storage.coding import delta
from raystow.storage.coding.chunk import ChunkEncoder, decode
from raystow.storage.coding.derived import Derivation, derive
from raystow.storage.coding.digest import raw_digest, stored_digest
from raystow.storage.coding.dtypes import DTYPES, dtype
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, SaveFailed, Unsupported
from raystow.storage.format import keys
from raystow.storage.format import root as format_root
from raystow.storage.format.manifest import SCHEMA, Fragment, rows_of
from raystow.storage.limits import MAX_CHAIN
from raystow.storage.repository import Repository
from raystow.storage.root import invariants
from raystow.storage.versions.version import Version

ENCODER = ChunkEncoder(1 << 20)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(DTYPES)),
    size=st.sampled_from([delta.LEAST, delta.LEAST + 16, 100_000, 700_000]),
    distance=st.sampled_from([0, 1, 200, 2**15, 2**63]),
    seed=st.integers(0, 99),
)
def test_delta_encoding_is_lossless_for_any_bytes(name: str, size: int, distance: int, seed: int) -> None:
    """Random bytes include NaNs with payloads and all other bit patterns of a dtype."""
    kind, random = dtype(name), np.random.default_rng(seed)
    base = random.integers(0, 256, size // kind.itemsize * kind.itemsize, np.uint8)
    word = np.dtype(f"u{kind.width}")
    raw = (base.view(word) + random.integers(0, distance, base.size // kind.width, np.uint64, endpoint=True).astype(word)).view(
        np.uint8
    )
    done = delta.encode(ENCODER, raw, kind, base.copy(), 7)
    if distance <= 1 < kind.width:
        assert done is not None, "the delta is smaller"
    if done is None:
        return
    stored, coding = done
    assert (coding.base, coding.rotated) == (7, False)
    found = np.empty(raw.size + 1, np.uint8)[1:]  # an unaligned address
    decode(coding, kind, stored, found, base)
    assert found.tobytes() == raw.tobytes()


def test_no_delta_is_made_if_it_saves_no_space() -> None:
    random = np.random.default_rng(0)
    numbers, others = (random.normal(size=50_000).astype(np.float32).view(np.uint8) for _ in range(2))
    assert delta.encode(ENCODER, numbers, dtype("float32"), others, 1) is None
    few = np.zeros(delta.LEAST - 4, np.uint8)
    assert delta.encode(ENCODER, few, dtype("float32"), few.copy(), 1) is None
    empty = np.empty(0, np.uint8)
    assert delta.encode(ENCODER, empty, dtype("float32"), empty, 1) is None


def test_decoding_a_delta_requires_its_base() -> None:
    raw = np.zeros(1 << 17, np.uint8)
    stored, coding = delta.encode(ENCODER, raw, dtype("float32"), raw.copy(), 3) or (None, None)
    for base in (None, raw[1:]):
        with pytest.raises(Unsupported, match="version 3"):
            decode(coding, dtype("float32"), stored, raw.copy(), base)


def steps(count: int) -> list[dict[str, np.ndarray]]:
    """Return a state at ``count`` steps: weights with small changes, counters, and a tensor too small for a delta."""
    random = np.random.default_rng(5)
    states = [{"w": random.normal(size=(400, 300)).astype(np.float32), "n": np.arange(20_000), "b": np.ones(7, np.float16)}]
    for _ in range(count - 1):
        last = states[-1]
        moved = (last["w"] * (1 + random.normal(0, 1e-4, last["w"].shape))).astype(np.float32)
        states.append({"w": moved, "n": last["n"] + 1, "b": last["b"] + np.float16(1)})
    return states


BOXES = [((0, 0), (400, 200)), ((0, 200), (150, 100)), ((150, 200), (250, 100))]


def cut(state: dict[str, np.ndarray]) -> dict[str, Cut]:
    return {name: (array, BOXES if name == "w" else [((0,), array.shape)]) for name, array in state.items()}


def history(count: int, to: Sequence[int | None]) -> tuple[Repository, list[Version], list[dict[str, np.ndarray]]]:
    """Return versions, each a delta to the version with its index in ``to``, and their states."""
    repo = memory_repository()
    committer, versions, states = Committer(repo, "me"), list[Version](), steps(count)
    for state, index in zip(states, to, strict=True):
        base = None if index is None else (versions[index].id, states[index])
        versions.append(write(committer, cut(state), base=base))
    return repo, [repo.version(version.id) for version in versions], states


def test_a_delta_chain_is_read_whole_in_parts_and_in_place() -> None:
    repo, versions, states = history(4, [None, 0, 1, 2])
    for version, state in zip(versions, states, strict=True):
        assert all(version.read(name).tobytes() == array.tobytes() for name, array in state.items())
    newest, state = versions[-1], states[-1]
    assert np.array_equal(newest.read("w", (slice(140, 160), slice(190, 290, 3))), state["w"][140:160, 190:290:3])
    into = {name: np.zeros_like(array) for name, array in state.items()}
    raystow.restore(newest, into)
    assert all(np.array_equal(into[name], array) for name, array in state.items())
    assert [version.record.bases for version in versions] == [(), (1,), (2,), (3,)]
    assert [entry.bases for entry in repo.root().versions] == [(), (1,), (2,), (3,)]
    assert all(chunk.coding.base is None for chunk in newest.chunks["b"]), "too small"
    assert newest.bytes < 0.75 * versions[0].bytes
    assert repo.verify(newest).stored == newest.bytes
    repo.verify(newest, deep=False)


def test_a_tensor_derived_from_a_delta_is_read() -> None:
    repo, states = memory_repository(), steps(2)
    committer = Committer(repo, "me")
    for i, state in enumerate(states):
        former = (i, {"master": states[i - 1]["w"]}) if i else None
        rows, pack = rows_and_pack({"master": whole(state["w"])}, former)
        own = structs.replace(rows[0], kind="tensor")
        bits = derive(state["w"].reshape(-1).view(np.uint8), "float32", "float16")
        half = structs.replace(
            own, name="half", dtype="float16", derivation=Derivation("master", "float32"), raw_digest=raw_digest(bits)
        )
        write_rows(committer, [own, half], pack)
    newest = repo.version(2)
    assert {chunk.coding.base for rows in newest.chunks.values() for chunk in rows} == {1}
    assert np.array_equal(np.asarray(newest.read("half")), states[1]["w"].astype(np.float16))
    assert np.array_equal(np.asarray(newest.read("master")), states[1]["w"])
    repo.verify(newest)
    plan = plan_restore(newest, {"master": np.zeros_like(states[1]["w"]), "half": np.zeros((400, 300), np.float16)})
    assert plan.nbytes == newest.bytes + repo.version(1).bytes, "bytes that two tensors share are read once"


def test_restore_plans_count_the_bytes_of_base_versions() -> None:
    _, versions, states = history(3, [None, 0, 1])
    alone, through = versions[0].bytes, versions[2].bytes
    plan = plan_restore(versions[2], {name: np.zeros_like(array) for name, array in states[2].items()})
    assert [(part.base, part.node) for part in plan.reads] == [(0, 0), (1, 0), (2, 0)]
    small = sum(chunk.stored for chunk in versions[2].chunks["b"])
    assert plan.nbytes == through + (alone - small) + (versions[1].bytes - small)
    assert plan.raw == versions[2].raw
    world = plan_world(versions[2], 2, per_node=1)
    assert world.store.nbytes == plan.nbytes


def test_the_memory_cost_grows_with_the_chain_length() -> None:
    _, versions, _ = history(3, [None, 0, 1])
    costs = [max(run.cost for run in version.reader().whole(version.chunks["w"])) for version in versions]
    assert costs[0] < costs[1] < costs[2]


def test_another_attempt_of_a_base_decodes_its_deltas() -> None:
    repo, versions, states = history(2, [None, 0])
    former, store = versions[0], repo.store
    copy = replace(former.record, attempt="f" * 16)
    for info in list(store.list(keys.prefix(former.id, former.attempt))):
        store.put(info.key.replace(former.attempt, copy.attempt), [store.get(info.key, max_bytes=1 << 30)])
        store.delete([info.key])
    store.put(copy.key(), [copy.dump()])
    entry = copy.entry(stored_digest(copy.dump()), len(copy.dump()))
    overwrite_root(repo, lambda root: root if entry in root.versions else replace(root, versions=(entry, *root.versions[1:])))
    assert np.array_equal(repo.version(2).read("w"), states[1]["w"])
    repo.verify(repo.version(2))


@pytest.mark.parametrize("deep", [False, True])
def test_damage_of_a_base_names_its_pack_and_the_version(deep: bool) -> None:
    repo, versions, _ = history(3, [None, 0, 1])
    pack = pack_key(versions[0], 0)
    if deep:
        flip(repo, pack)
    else:
        repo.store.delete([pack])
    for version in versions[1:]:
        with pytest.raises(Damaged, match=f"version {version.id}.*delta") as caught:
            repo.verify(version, deep=deep)
        assert caught.value.subject == pack
        with pytest.raises(Damaged, match=f"'w' of version {version.id}") as caught:
            repo.version(version.id).read("w")
        assert caught.value.subject == pack


def test_a_missing_base_is_damage() -> None:
    repo, versions, _ = history(2, [None, 0])
    overwrite_root(repo, lambda root: replace(root, versions=root.versions[1:]) if len(root.versions) > 1 else root)
    with pytest.raises(Damaged, match="version 1") as caught:
        repo.version(2).read("w")
    assert caught.value.subject == versions[1].record_key
    with pytest.raises(Damaged, match="version 1"):
        repo.verify(repo.version(2), deep=False)


def test_a_base_in_other_boxes_is_damage() -> None:
    repo, states = memory_repository(), steps(2)
    committer = Committer(repo, "me")
    write(committer, {"w": (states[0]["w"], [((0, 0), (400, 300))])})
    write(committer, {"w": (states[1]["w"], BOXES)}, base=(1, states[0]))
    for look in (lambda: repo.version(2).read("w"), lambda: repo.verify(repo.version(2), deep=False)):
        with pytest.raises(Damaged, match="no chunk of just 'w'"):
            look()


def test_a_base_must_be_an_older_version() -> None:
    """A commit and a read both refuse a base that is not older."""
    repo, versions, states = history(2, [None, 0])
    committer = Committer(repo, "another")
    for base in (2, 3):
        with pytest.raises(Damaged, match=f"version {base}"):
            versions[1].bases.version(base)
        with pytest.raises(SaveFailed, match=f"version {base + 1}"):
            write(committer, cut(states[1]), base=(base + 1, states[0]))


def test_a_chain_above_the_limit_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root may list fewer bases than the records have, so that it is no damage by itself."""
    count = MAX_CHAIN + 1
    monkeypatch.setattr(format_root, "MAX_CHAIN", count)
    with monkeypatch.context() as patch:
        patch.setattr(invariants, "check", lambda *_: None)
        repo, versions, states = history(count, [None, *range(count - 1)])
    assert np.array_equal(versions[-2].read("w"), states[-2]["w"])
    with pytest.raises(Damaged, match="too far down a chain"):
        versions[-1].read("w")
    with pytest.raises(Damaged, match="too far down a chain"):
        repo.verify(versions[-1], deep=False)


def test_bases_missing_in_the_root_are_damage() -> None:
    repo, versions, _ = history(2, [None, 0])
    silent = replace(versions[1].entry, bases=())
    overwrite_root(repo, lambda root: root if silent in root.versions else replace(root, versions=(root.versions[0], silent)))
    with pytest.raises(Damaged, match="the root \\(\\)"):
        repo.verify(repo.version(2), deep=False)


@pytest.mark.parametrize(
    ("transform", "base", "kind"),
    [
        (["delta", "planes"], None, Unsupported),
        (["planes"], 1, Unsupported),
        (["delta", "rotl1", "planes"], 1, Unsupported),
        (["delta", "delta"], 1, Unsupported),
        (["delta", "planes"], 0, Damaged),
        (["delta", "planes"], -3, Damaged),
    ],
)
def test_invalid_transforms_and_bases_are_refused(transform: list[str], base: int | None, kind: type) -> None:
    row = {"name": "t", "path": '["t"]', "kind": "tensor", "value": None, "dtype": "float32", "shape": [2], "offset": [0]}
    row |= {"extent": [2], "group": "weights", "pack": 0, "start": 0, "base": base, "transform": transform, "codecs": ["raw"] * 4}
    row |= {"stored": [2] * 4, "stream": 1, "streams": [], "raw_digest": 0, "stored_digest": bytes(32)}
    with pytest.raises(kind):
        Fragment.of(rows_of(pa.Table.from_pylist([row], SCHEMA)), 0)
