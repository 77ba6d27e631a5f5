"""The memory for a fragment is limited by its size and by the counts in the version record."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.builders import empty_record, rows_and_pack, whole

from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged
from raystow.storage.format import keys
from raystow.storage.format.manifest import Fragment, Value
from raystow.storage.format.selection import Sought, select
from raystow.storage.format.version_record import PackInfo
from raystow.storage.repository import Repository
from raystow.storage.runtime.memory_budget import MemoryBudget

ROWS, _ = rows_and_pack({"w": whole(np.arange(1000.0))})
TABLE = pq.read_table(pa.BufferReader(Fragment(0, (ROWS[0],), (Value("v", '["v"]', "1", (0,)),)).dump()))
SECOND = TABLE.slice(1, 1)  # the row of the chunk; the first row is that of the value


def bomb(column: str, values: pa.Array) -> bytes:
    """Return a fragment of few bytes whose column needs much memory."""
    rows = pa.concat_tables([SECOND] * len(values)).combine_chunks()
    table = rows.set_column(rows.column_names.index(column), rows.schema.field(column), values)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_statistics=False)
    return bytes(sink.getvalue())


def numbers(kind: pa.DataType) -> pa.Array:
    ends = pa.array([0, 30_000_000], pa.int32())
    return pa.ListArray.from_arrays(ends, pa.array(np.ones(30_000_000, np.int8)).cast(kind))


def peak() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10


@pytest.mark.parametrize(
    ("column", "make"),
    [
        ("streams", lambda: numbers(pa.int32())),
        ("shape", lambda: numbers(pa.int64())),
        ("name", lambda: pa.array(["n" * (1 << 16)] * 2000)),
        ("value", lambda: pa.array(["0" * (100 << 20)])),
        ("group", lambda: pa.array(["n" * (1 << 16)] * 14_000)),
    ],
)
def test_a_small_fragment_takes_little_memory(column: str, make: object) -> None:
    data = bomb(column, make())  # type: ignore[operator]
    assert len(data) < 40_000
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    for parse in (
        lambda: Fragment.load(data, 0, "key"),
        lambda: select(data, 0, "key", {"w": Sought()}),
    ):
        with pytest.raises(Damaged, match="key"):
            parse()
    assert peak() - before < 300 << 20


def test_a_large_value_of_equal_characters_is_stored_and_read() -> None:
    text = '"' + "0" * (70 << 20) + '"'
    fragment = Fragment(0, (), (Value("v", '["v"]', text, (0,)),))
    data = fragment.dump()
    assert Fragment.load(data, 0, "key") == fragment


def test_threads_share_a_budget() -> None:
    budget, order = MemoryBudget(10), list[str]()
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with budget.taking(100):  # the thread is alone, even if it exceeds the budget
            inside.set()
            leave.wait(10)
            order.append("first")

    def second() -> None:
        with budget.taking(1):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(10)
    assert order == ["first", "second"]
    with budget.taking(5), budget.taking(5):
        pass


def test_another_chunk_count_in_the_record_is_damage(repository: Repository) -> None:
    committer = Committer(repository, "me")
    rows, pack = rows_and_pack({"w": whole(np.arange(1000.0))})
    fragment, record = Fragment(0, tuple(rows), ()), empty_record(committer)
    data = fragment.dump()
    repository.store.put(keys.fragment(record.id, record.attempt, 0), [data])
    repository.store.put(keys.pack(record.id, record.attempt, 0, "weights", 0), [pack])
    info = replace(fragment.info(data, [0]), chunks=2)
    version = committer.commit(replace(record, fragments=(info,), packs=(PackInfo(0, "weights", 0, len(pack)),)))
    with pytest.raises(Damaged, match="has 1 chunks, and the record says 2"):
        version.read("w")
