"""The chunks of a pack that are fetched together."""

from __future__ import annotations

from helpers.builders import coded_row

from raystow.storage.coding.chunk import Coding
from raystow.storage.format.manifest import Chunk
from raystow.storage.stores.memory import MemoryStore
from raystow.storage.versions.reader import PackReader
from raystow.storage.versions.runs import ByteRun, Piece

MIB = 1 << 20


def raw_chunk(number: int, size: int, base: int | None = None) -> Chunk:
    """Return the chunk after ``number`` other chunks of this size in its pack."""
    coding = Coding(False, False, ("raw",), (size,), base=base)
    return coded_row(number, "uint8", size, coding)


def chain(one: Chunk, below: int) -> ByteRun | None:
    """Return the chain of delta bases of a chunk. Each base is as large as the chunk."""
    if not below:
        return None
    return ByteRun(f"versions/{below:08d}", 0, one.coding.size, (Piece(one, base=chain(one, below - 1)),))


def runs(size: int, count: int, below: int) -> list[ByteRun]:
    """Return the runs of ``count`` chunks, each at the end of such a chain."""

    class Chain:
        def run(self, chunk: Chunk) -> ByteRun:
            found = chain(raw_chunk(0, size, 1), below)
            assert found is not None
            return found

        def referenced(self, chunk: Chunk) -> tuple[PackReader, Chunk]:
            raise AssertionError("no chunk here is a reference")

    reader = PackReader(MemoryStore("runs"), 99, "0" * 16, bases=Chain())
    return reader.whole([raw_chunk(number, size, 1 if below else None) for number in range(count)])


def test_adjacent_chunks_are_fetched_together_up_to_a_limit() -> None:
    found = runs(MIB, 40, 0)
    assert [run.length // MIB for run in found] == [16, 16, 8]


def test_the_size_of_a_run_includes_its_bases() -> None:
    found = runs(MIB, 40, 3)
    assert [run.length // MIB for run in found] == [4] * 10
    assert {run.nbytes // MIB for run in found} == {16}
    assert [piece.chunk.name for run in found for piece in run.pieces] == [f"t{number}" for number in range(40)]


def test_a_chunk_with_large_bases_is_fetched_separately() -> None:
    assert [run.length // MIB for run in runs(5 * MIB, 3, 4)] == [5, 5, 5]
