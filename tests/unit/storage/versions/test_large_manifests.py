"""A manifest that is too large for memory is read one fragment at a time, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.builders import empty_record, memory_repository, rows_and_pack
from helpers.large_versions import LITTLE, ROWS, keep_rows, peak_of, save
from helpers.scripted_store import script
from msgspec import structs

from raystow.storage.checks.verify import verify_sizes
from raystow.storage.commit.committer import Committer
from raystow.storage.copies.copy import plan_copy
from raystow.storage.errors import Damaged
from raystow.storage.format import keys
from raystow.storage.format.manifest import Fragment
from raystow.storage.format.selection import Sought
from raystow.storage.repository import Repository, open_repository
from raystow.storage.retention import rewrite
from raystow.storage.versions.version import Version

Keep = Callable[[int], None]


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Sets the number of rows from which on a manifest is large."""
    return lambda rows: keep_rows(monkeypatch, rows)


@pytest.fixture
def large(keep: Keep) -> None:
    keep(5)


@pytest.mark.parametrize(
    "look",
    [
        lambda repository, version: version.tensors(),
        lambda repository, version: version.contents,
        lambda repository, version: version.values(2),
        lambda repository, version: version.values(99),
        lambda repository, version: version.per_rank("rank"),
        lambda repository, version: version.per_rank("epoch"),
        lambda repository, version: version.read("t1").tolist(),
        lambda repository, version: version.read("t0", np.s_[5:9, 1]).tolist(),
        lambda repository, version: repository.verify(version),
        lambda repository, version: rewrite.plan(version, None).sampled(),
        lambda repository, version: [pack.size for pack in version.packs],
    ],
    ids=[
        *("tensors", "contents", "values", "values of no rank", "values of each rank", "equal values"),
        *("read", "read a part", "verify", "rewrite", "packs"),
    ],
)
def test_a_large_manifest_says_what_a_small_one_says(look: Callable[[Repository, Version], object], keep: Keep) -> None:
    repository = memory_repository()
    version = save(repository, 4)
    small = look(repository, repository.version(version))
    keep(5)
    assert look(repository, repository.version(version)) == small


def test_each_walk_reads_a_large_manifest_again(repository: Repository, keep: Keep) -> None:
    version, read, get = save(repository, 3), list[str](), repository.store.get

    def noted(key: str, *, max_bytes: int) -> bytes:
        read.append(key)
        return get(key, max_bytes=max_bytes)

    script(repository.store, get=noted)
    fragments = [keys.fragment(version.id, version.attempt, node) for node in range(3)]
    for kept, expected in ((36, fragments), (35, 2 * fragments)):
        keep(kept)
        read.clear()
        opened = repository.version(version)
        assert [info.node for _ in range(2) for info, _ in opened.walk()] == 2 * [0, 1, 2]
        assert sorted(key for key in read if key.endswith(".parquet")) == sorted(expected)


@pytest.mark.usefixtures("large")
def test_the_base_of_a_chunk_is_sought_by_rank(repository: Repository) -> None:
    """Nodes are numbered as they come, in each save anew."""
    base, read, get = save(repository, 5), list[str](), repository.store.get
    version = repository.version(save(repository, 5, first=2, base=base.id))
    chunks = [row for row in version.rows({"t1": Sought(tensor=True)})["t1"] if row.node == 4]
    assert (len(chunks), version.record.fragments[2].node) == (ROWS, 4)

    def noted(key: str, *, max_bytes: int) -> bytes:
        read.append(key)
        return get(key, max_bytes=max_bytes)

    script(repository.store, get=noted)
    assert all(version.bases.referenced(chunk)[1].node == 2 for chunk in chunks)
    assert [key for key in read if key.endswith(".parquet")] == [keys.fragment(base.id, base.attempt, 2)]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("wrong", ["moved", "twice", "absent"])
def test_boxes_on_several_nodes_are_compared(repository: Repository, wrong: str) -> None:
    """The boxes of each node are fine by themselves."""
    record = empty_record(committer := Committer(repository, "me"))
    places = {"moved": [0, 2, 5], "twice": [0, 2, 2], "absent": [0, 2]}[wrong]
    infos = []
    for node, place in enumerate(places):
        rows, data = rows_and_pack({"t": (np.arange(8.0), [((place,), (2,))])})
        fragment = Fragment(node, tuple(structs.replace(row, node=node, shape=(6,)) for row in rows), ())
        repository.store.put(keys.pack(record.id, record.attempt, node, "weights", 0), [data])
        repository.store.put(keys.fragment(record.id, record.attempt, node), [stored := fragment.dump()])
        infos.append(fragment.info(stored, [node]))
    version = committer.commit(replace(record, world_size=len(places), fragments=tuple(infos), packs=None))
    with pytest.raises(Damaged, match=r"'?t'?.*(exactly once|covers 4 of 6|does not lie in shape)"):
        repository.verify(version, deep=False)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("node", [0, 3])
def test_a_large_version_with_a_missing_pack_is_damaged(repository: Repository, node: int) -> None:
    version = save(repository, 4)
    key = keys.pack(version.id, version.attempt, node, "weights", 0)
    repository.store.delete([key])
    with pytest.raises(Damaged, match=f"{key}: the pack is missing"):
        repository.verify(version, deep=False)


@pytest.mark.usefixtures("large")
def test_a_large_version_is_copied(tmp_path: Path, repository: Repository) -> None:
    version = save(repository, 4)
    plan = plan_copy(repository.uri, str(tmp_path / "replica"))
    (copied,) = plan.execute()
    assert copied.read("t0").tolist() == version.read("t0").tolist()
    assert open_repository(str(tmp_path / "replica")).verify(copied).packs == 4


@pytest.fixture(scope="module")
def worlds() -> dict[int, Repository]:
    """Return repositories with a version of many rows each, by the number of its nodes."""
    found = {nodes: memory_repository() for nodes in (2, 8)}
    for nodes, repository in found.items():
        save(repository, nodes, tensors=64)
    return found


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "look",
    [
        lambda version: verify_sizes(version),
        lambda version: version.contents,
        lambda version: version.values(2),
        lambda version: version.per_rank("rank"),
        lambda version: sum(pack.size for pack in version.packs),
    ],
    ids=["verify", "contents", "values", "values of each rank", "packs"],
)
def test_memory_does_not_grow_with_the_nodes(look: Callable[[Version], object], worlds: dict[int, Repository]) -> None:
    """Of four times as many nodes, the record and the fragments that are read ahead are in memory."""

    def peak(nodes: int) -> int:
        version = worlds[nodes].latest()
        assert version is not None
        _ = version.record
        return peak_of(lambda: look(version))

    assert peak(8) - peak(2) < 6 * ROWS * 64 * LITTLE
