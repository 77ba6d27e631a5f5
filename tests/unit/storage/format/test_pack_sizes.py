"""The packs of a version whose record lists none are those that the rows of its fragments name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers.builders import memory_repository, rows_and_pack, whole, write
from msgspec import structs

from raystow.storage.coding.chunk import Coding
from raystow.storage.coding.derived import Derivation
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged
from raystow.storage.format import keys
from raystow.storage.format.manifest import SCHEMA, Chunk, Fragment, Value
from raystow.storage.format.pack_sizes import pack_sizes
from raystow.storage.format.selection import select
from raystow.storage.format.version_record import VersionRecord
from raystow.storage.repository import Repository
from raystow.storage.versions.version import Version

KEY = keys.fragment(1, "0" * 16, 0)
VALUE = Value("lr", '["lr"]', "0.1", (0,))


@pytest.fixture
def repository() -> Repository:
    return memory_repository()


def chunks() -> list[Chunk]:
    """Return rows in three packs of two groups: with bytes, derived, without elements, and one that refers to another version."""
    rows, _ = rows_and_pack({"a": whole(np.arange(3000.0)), "b": whole(np.arange(50)), "none": whole(np.zeros((0, 3)))})
    derived = structs.replace(rows[0], name="c", derivation=Derivation("a", "float64"), kind="tensor")
    same = structs.replace(rows[1], name="d", group="other", pack=7, coding=Coding(False, False, (), (), base=1))
    placed = [structs.replace(rows[1], name="e", group="optimizer", pack=4), structs.replace(rows[2], name="f", pack=9)]
    return [*rows, derived, same, *placed]


def test_the_rows_name_the_packs() -> None:
    rows = chunks()
    fragment = Fragment(0, tuple(rows), (VALUE,))
    first, size = rows[2].start, rows[1].coding.size
    assert fragment.packs == {("weights", 0): first, ("optimizer", 4): rows[1].start + size, ("weights", 9): first}
    data = fragment.dump()
    assert pack_sizes(data, KEY) == select(data, 0, KEY, {}).packs == Fragment.load(data, 0, KEY).packs == fragment.packs
    assert fragment.info(data, [0]).packs == 3
    assert pack_sizes(Fragment(0, (), (VALUE,)).dump(), KEY) == {}


def test_packs_of_several_row_groups_are_found() -> None:
    rows = [structs.replace(row, name=f"{row.name}{i}", pack=i % 5) for i in range(40) for row in chunks()[:2]]
    fragment = Fragment(0, tuple(rows), ())
    table = pa.parquet.read_table(pa.BufferReader(fragment.dump()))
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, row_group_size=7)
    assert pack_sizes(bytes(sink.getvalue()), KEY) == fragment.packs


@pytest.mark.parametrize(
    "fields",
    [
        {"pack": None},
        {"pack": -1},
        {"group": None},
        {"start": None},
        {"start": -1},
        {"start": 2**63 - 1},
        {"stored": [None]},
        {"stored": [-1]},
        {"stored": [2**63 - 1, 2**63 - 1, 2]},
    ],
)
def test_a_row_outside_all_packs_is_damage(fields: dict[str, Any]) -> None:
    table = pa.parquet.read_table(pa.BufferReader(Fragment(0, tuple(chunks()), ()).dump()))
    rows = table.to_pylist()
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_pylist([rows[0], {**rows[1], **fields}], SCHEMA), sink)
    with pytest.raises(Damaged, match=KEY):
        pack_sizes(bytes(sink.getvalue()), KEY)


def saved(repository: Repository) -> Version:
    return write(Committer(repository, "me"), {"w": whole(np.arange(9000.0)), "v": whole(np.ones(77))})


def test_a_version_knows_the_packs_of_fragments_that_were_read(repository: Repository) -> None:
    version = saved(repository)
    assert version.record.packs is None
    assert version.pack_size(0, "weights", 0) is None
    (pack,) = version.packs
    assert version.pack_size(0, "weights", 0) == pack.size == version.bytes
    assert version.pack_size(1, "weights", 0) is None
    assert repository.verify(version).packs == version.record.pack_count == 1


def test_a_record_that_counts_other_packs_is_damage(repository: Repository) -> None:
    record = saved(repository).record
    committer = Committer(repository, "me")
    (id, attempt), old = committer.reserve(), record
    for key in (keys.fragment(1, old.attempt, 0), keys.pack(1, old.attempt, 0, "weights", 0)):
        data = repository.store.get(key, max_bytes=1 << 20)
        repository.store.put(key.replace(keys.prefix(1, old.attempt), keys.prefix(id, attempt)), [data])
    info = replace(record.fragments[0], packs=2)
    version = committer.commit(replace(record, id=id, attempt=attempt, epoch=committer.epoch, fragments=(info,)))
    for read in (lambda: version.fragments, lambda: [*version.packs], lambda: repository.verify(version)):
        with pytest.raises(Damaged, match="has 1 packs, and the record says 2"):
            read()


@pytest.mark.parametrize("packs", [None, -1, 4, 1.0, True, "1"])
def test_a_record_without_a_number_of_packs_is_damage(repository: Repository, packs: object) -> None:
    record = saved(repository).record
    odd = replace(record, fragments=(replace(record.fragments[0], packs=packs),))  # type: ignore[arg-type]
    with pytest.raises(Damaged, match="'packs'"):
        VersionRecord.load(odd.dump(), odd.key())
