"""Chunks that are stored once and referenced by later versions: reads, plans, verification, compaction, and detection of
damage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from compat import reader
from helpers.builders import memory_repository, rows_and_pack, whole, write_rows
from helpers.colliding_tensors import colliding_tensors
from helpers.packs import flip, pack_key
from helpers.scripted_store import script
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from raystow.orchestrator.restore.planner import plan_restore
from raystow.orchestrator.restore.what_if import plan_world
from raystow.storage.coding import digest
from raystow.storage.coding.chunk import reference
from raystow.storage.coding.derived import Derivation, derive
from raystow.storage.coding.digest import SecretKeys, digest_pair, process_keys, raw_digest, stored_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, Unsupported
from raystow.storage.format.manifest import SCHEMA, Chunk, Fragment, rows_of
from raystow.storage.repository import Repository, create_repository
from raystow.storage.retention.policy import Policy
from raystow.workers.protocol.messages import SessionOpened

RANDOM = np.random.default_rng(3)
FROZEN = RANDOM.normal(size=(300, 200)).astype(np.float32)
TRAINED = [RANDOM.normal(size=9_000).astype(np.float32) for _ in range(4)]


def referring(row: Chunk, id: int) -> Chunk:
    return replace(row, pack=0, start=0, coding=reference(id), stored_digest=stored_digest())


def frozen_rows() -> tuple[list[Chunk], bytes]:
    """Return the rows of a frozen tensor in two chunks, and of two tensors that are derived from it."""
    rows, pack = rows_and_pack({"frozen": (FROZEN, [((0, 0), (200, 200)), ((200, 0), (100, 200))])})
    more = list[Chunk]()
    for row in rows:
        part = FROZEN[row.offset[0] : row.offset[0] + row.extent[0]].reshape(-1).view(np.uint8)
        half = raw_digest(derive(part, "float32", "float16"))
        follows = Derivation("frozen", "float32")
        more.append(replace(row, kind="tensor"))
        more.append(replace(row, kind="tensor", name="half", dtype="float16", derivation=follows, raw_digest=half))
        more.append(replace(row, kind="tensor", name="tied", derivation=follows))
    return more, pack


def history(repo: Repository, count: int = 3) -> dict[str, bytes]:
    """Write versions; all later versions refer to the first one. Return the bytes of the frozen tensors."""
    committer, (frozen, pack) = Committer(repo, "me"), frozen_rows()
    for number in range(count):
        own, packed = rows_and_pack({"trained": whole(TRAINED[number])})
        if number:
            write_rows(committer, [*own, *(referring(row, 1) for row in frozen)], packed)
        else:
            moved = [replace(row, start=len(pack)) for row in own]
            write_rows(committer, [*frozen, *moved], pack + packed)
    return {"frozen": FROZEN.tobytes(), "half": FROZEN.astype(np.float16).tobytes(), "tied": FROZEN.tobytes()}


@pytest.fixture
def repo() -> Repository:
    return memory_repository()


def check(repo: Repository, id: int, frozen: Mapping[str, bytes]) -> None:
    version = repo.version(id)
    for name, raw in {**frozen, "trained": TRAINED[id - 1].tobytes()}.items():
        assert np.asarray(version.read(name)).tobytes() == raw, name
    part = np.asarray(version.read("frozen", slice(190, 250)))
    assert np.array_equal(part, FROZEN[190:250])
    repo.verify(version)
    repo.verify(version, deep=False)


def test_references_are_read_through_the_version_they_name(repo: Repository) -> None:
    frozen = history(repo)
    for id in (1, 2, 3):
        check(repo, id, frozen)
    assert [entry.bases for entry in repo.root().versions] == [(), (1,), (1,)]
    newest = repo.version(3)
    assert newest.bytes == newest.tensors()["trained"].stored < 0.2 * repo.version(1).bytes
    assert newest.raw == repo.version(1).raw


def test_plans_count_referenced_bytes_where_they_are_stored(repo: Repository) -> None:
    history(repo)
    newest = repo.version(3)
    blank = {
        "frozen": np.zeros_like(FROZEN),
        "half": np.zeros((300, 200), np.float16),
        "tied": np.zeros_like(FROZEN),
        "trained": np.zeros_like(TRAINED[0]),
    }
    plan = plan_restore(newest, blank)
    assert [(read.base, read.node) for read in plan.reads] == [(0, 0), (1, 0)]
    frozen = sum(chunk.coding.size for chunk in repo.version(1).chunks["frozen"])
    assert plan.nbytes == newest.bytes + frozen, "bytes shared by two tensors are read once"
    plan.execute()
    assert np.array_equal(blank["frozen"], FROZEN)
    assert plan_world(newest, 2, per_node=1).store.nbytes == newest.bytes + frozen


def test_the_independent_reader_reads_references(tmp_path: Path) -> None:
    repo = create_repository(str(tmp_path))
    history(repo)
    found = reader.read(tmp_path)
    assert found["frozen"].tobytes() == FROZEN.tobytes()
    assert found["half"].tobytes() == FROZEN.astype(np.float16).tobytes()


def test_a_version_with_references_is_compacted(repo: Repository) -> None:
    frozen = history(repo)
    repo.plan_compaction([2]).execute()
    assert [entry.bases for entry in repo.root().versions] == [(), (), (1,)]
    for id in (1, 2, 3):
        check(repo, id, frozen)


def test_retention_keeps_a_version_while_it_is_referenced(repo: Repository) -> None:
    frozen = history(repo)
    repo.plan_retention(Policy(keep_last=1)).execute()
    assert [entry.id for entry in repo.root().versions] == [1, 3]
    check(repo, 3, frozen)
    own, pack = rows_and_pack({"trained": whole(TRAINED[3])})
    write_rows(Committer(repo, "another"), own, pack)
    repo.plan_retention(Policy(keep_last=1)).execute()
    assert [entry.id for entry in repo.root().versions] == [4]


def test_a_thinned_version_keeps_its_references(repo: Repository) -> None:
    frozen = history(repo)
    repo.plan_retention(Policy(resumable=1)).execute()
    root = repo.root().versions
    assert [entry.resumable for entry in root][-1]
    check(repo, 2, frozen)
    check(repo, 3, frozen)


def test_damage_of_a_referenced_chunk_names_its_pack(repo: Repository) -> None:
    history(repo)
    flip(repo, pack := pack_key(repo.version(1), 0))
    with pytest.raises(Damaged) as caught:
        repo.version(2).read("frozen")
    assert caught.value.subject == pack
    with pytest.raises(Damaged):
        repo.verify(repo.version(2))


def test_a_reference_to_a_reference_is_damage(repo: Repository) -> None:
    """A reference to a chunk with other elements is damage as well."""
    history(repo)
    rows, _ = frozen_rows()
    committer = Committer(repo, "me too")
    write_rows(committer, [referring(row, 2) for row in rows], b"")
    with pytest.raises(Damaged, match="reference itself"):
        repo.version(4).read("frozen")
    other = [replace(row, dtype="int32") for row in rows if row.derivation is None]
    write_rows(committer, [referring(row, 1) for row in other], b"")
    with pytest.raises(Damaged, match="no chunk of just"):
        repo.version(5).read("frozen")
    wrong = [replace(row, raw_digest=row.raw_digest ^ 1) for row in rows if row.derivation is None]
    write_rows(committer, [referring(row, 1) for row in wrong], b"")
    with pytest.raises(Damaged, match="do not match their digest"):
        repo.version(6).read("frozen")


def test_verification_reads_a_shared_base_once(repo: Repository) -> None:
    """Each version refers to all earlier ones, so the paths to a base double with each version."""
    committer, former = Committer(repo, "me"), list[Chunk]()
    for id in range(1, 7):
        rows, pack = rows_and_pack({f"t{id}": whole(TRAINED[0] + id)})
        write_rows(committer, [*rows, *former], pack)
        former += [referring(row, id) for row in rows]
    assert repo.version(6).entry.bases == (1, 2, 3, 4, 5)
    get, read = repo.store.get, Counter[str]()

    def counted(key: str, *, max_bytes: int) -> bytes:
        read[key] += 1
        return get(key, max_bytes=max_bytes)

    script(repo.store, get=counted)
    repo.verify(repo.version(6), deep=False)
    fragments = [count for key, count in read.items() if key.endswith("parquet")]
    assert len(fragments) == 6
    assert max(fragments) == 2, "for all rows, and for a lookup of some"


@pytest.mark.parametrize(
    "changed",
    [{"base": None}, {"base": 0}, {"codecs": ["raw"], "stored": [0]}, {"transform": ["same", "planes"]}, {"streams": [1]}],
)
def test_invalid_references_are_refused(changed: dict[str, object]) -> None:
    row = {"name": "t", "path": '["t"]', "kind": "tensor", "value": None, "dtype": "float32", "shape": [2], "offset": [0]}
    row |= {"extent": [2], "group": "weights", "pack": 0, "start": 0, "base": 1, "transform": ["same"], "codecs": []}
    row |= {"stored": [], "stream": 1, "streams": [], "raw_digest": 0, "stored_digest": bytes(32)}
    (good,) = Fragment.of(rows_of(pa.Table.from_pylist([row], SCHEMA)), 0).chunks
    assert good.is_reference
    assert good.stored == 0
    with pytest.raises((Damaged, Unsupported)):
        Fragment.of(rows_of(pa.Table.from_pylist([row | changed], SCHEMA)), 0)


def test_a_proof_of_equality_needs_more_than_the_raw_digest() -> None:
    """All references have the BLAKE3 of no bytes, so their proof names what they refer to."""
    frozen, half, tied, *_ = frozen_rows()[0]
    for row, copy, rounded in ((frozen, tied, half), (referring(frozen, 1), referring(tied, 1), referring(half, 1))):
        assert row.proof == copy.proof != rounded.proof
        other = replace(row, name="other", stored_digest=row.stored_digest if row.is_reference else bytes(32))
        assert other.raw_digest == row.raw_digest
        assert other.proof != row.proof
    assert referring(frozen, 1).proof != referring(frozen, 2).proof
    assert replace(frozen, coding=replace(frozen.coding, rotated=not frozen.coding.rotated)).proof != frozen.proof


KEYS = SecretKeys(bytes(range(32)))


def halves(second: int) -> tuple[int, int]:
    return second % (1 << 64), second >> 64


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300_000), st.integers(0, 99), st.integers(0, 7))
def test_the_digest_pair_changes_with_every_bit(size: int, seed: int, shift: int) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, size + shift, np.uint8)[shift:]
    first, second = digest_pair(raw, KEYS)
    assert first == raw_digest(raw)
    words = np.frombuffer(raw.tobytes() + bytes(-size % 4), "<u4").tolist()
    totals = [0, 0]
    for i, word in enumerate(words):
        block, place = divmod(i, digest.BLOCK)
        for row, of in enumerate((word, word >> 16 | word % (1 << 16) << 16)):
            totals[row] += of * int(KEYS.words[row, place]) * int(KEYS.blocks[row, block])
    assert halves(second) == tuple(digest.finish(total, size) for total in totals)
    if size:
        other = raw.copy()
        other[seed % size] ^= 1
        changed, changed_second = digest_pair(other, KEYS)
        assert not {changed, *halves(changed_second)} & {first, *halves(second)}


def test_flipped_signs_change_both_halves_of_the_second_number() -> None:
    """The upper bits of words count less in the first half, the lower ones in the second."""
    for bit in (0, 15, 16, 31):
        words = np.random.default_rng(bit).integers(0, 1 << 32, 40_000, np.uint32)
        flipped = words ^ np.uint32(1 << bit)
        found, other = (halves(digest_pair(some.view(np.uint8), KEYS)[1]) for some in (words, flipped))
        changed = [digest.unfinished(a, 160_000) ^ digest.unfinished(b, 160_000) for a, b in zip(found, other, strict=True)]
        assert [total % (1 << least) for total, least in zip(changed, (bit, bit ^ 16), strict=True)] == [0, 0]
        assert all(changed)


def test_colliding_public_digests_have_other_secret_ones() -> None:
    """The secret of another process leads to other numbers."""
    one, other = (some.view(np.uint8) for some in colliding_tensors())
    pairs = [digest_pair(raw, keys) for raw in (one, other) for keys in (KEYS, SecretKeys(bytes(32)))]
    assert {first for first, _ in pairs} == {raw_digest(one)}
    assert len({half for _, second in pairs for half in halves(second)}) == 8
    assert process_keys() is process_keys()
    assert process_keys().secret not in (bytes(32), KEYS.secret)


def test_the_secret_of_digests_is_not_shown() -> None:
    for shown in (process_keys(), SessionOpened(1, 4096, 0.0, process_keys().secret)):
        assert str(process_keys().secret)[2:-1] not in f"{shown} {shown!r}"
        assert process_keys().secret.hex() not in f"{shown} {shown!r}"
