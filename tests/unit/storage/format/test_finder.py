"""A rank finds its rows in the fragments where they are expected, and searches other fragments only if necessary."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.coding.chunk import Coding
from raystow.storage.errors import Damaged
from raystow.storage.format.boxes import Box, overlap
from raystow.storage.format.manifest import TENSOR, Chunk, Fragment, Value, path_text
from raystow.storage.format.selection import Selection, Sought, select
from raystow.storage.format.version_record import FragmentInfo
from raystow.storage.versions.tensor_index import Finder, FoundRows, Seeker

CODING = Coding(False, False, ("raw",), (4,), b"", 65536)


def part(size: int, rank: int, world: int) -> Box:
    """Return the box that ``torch.chunk`` gives a rank."""
    step = -(-size // world)
    return (min(size, rank * step),), (max(0, min(size, (rank + 1) * step) - rank * step),)


def row(name: str, size: int, box: Box, node: int, dtype: str = "uint8") -> Chunk:
    return Chunk(name, path_text((name,)), TENSOR, dtype, (size,), *box, node, "weights", 0, 0, CODING, 0, bytes(32))


class Saved:
    """A version that records which fragments are read. ``sizes``: numbers of elements of 1-D tensors that all ranks have
    split.
    """

    def __init__(self, sizes: Mapping[str, int], ranks: int, *, per_node: int = 2) -> None:
        self.ranks, self.sizes = ranks, sizes
        self.nodes = [range(first, min(ranks, first + per_node)) for first in range(0, ranks, per_node)]
        self.rows: list[list[Chunk]] = [
            [
                row(name, size, box, node)
                for rank in of
                for name, size in sizes.items()
                if (box := part(size, rank, ranks))[1] != (0,) or (size == 0 and rank == 0)
            ]
            for node, of in enumerate(self.nodes)
        ]
        self.values: list[list[Value]] = [[] for _ in self.nodes]
        self.read: list[int] = []

    def finder(self, rank: int, world: int, raw: int = -1) -> Finder:
        infos = [FragmentInfo(node, 0, "", tuple(of), len(self.rows[node]), 0, 0) for node, of in enumerate(self.nodes)]
        return Finder(infos, self.read_fragment, Seeker(rank, world, self.ranks), raw)

    def find(self, rank: int, world: int) -> FoundRows:
        sought = {name: Sought(True, (size,), part(size, rank, world)) for name, size in self.sizes.items()}
        return self.finder(rank, world).find(sought)

    def read_fragment(self, info: FragmentInfo, sought: Mapping[str, Sought]) -> Selection:
        self.read.append(info.node)
        data = Fragment(info.node, tuple(self.rows[info.node]), tuple(self.values[info.node])).dump()
        return select(data, info.node, "tensors", sought)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    saved=st.integers(1, 40),
    per_node=st.integers(1, 8),
    world=st.integers(1, 40),
    data=st.data(),
)
def test_all_overlapping_rows_are_found_with_single_reads(
    sizes: list[int], saved: int, per_node: int, world: int, data: st.DataObject
) -> None:
    version = Saved({f"t{i}": size for i, size in enumerate(sizes)}, saved, per_node=per_node)
    rank = data.draw(st.integers(0, world - 1))
    found = version.find(rank, world)
    assert len(set(version.read)) == len(version.read)
    for name, size in version.sizes.items():
        box = part(size, rank, world)
        wanted = {chunk.offset for rows in version.rows for chunk in rows if chunk.name == name and overlap(box, chunk.box)}
        got = [chunk.offset for chunk in found.chunks[name] if overlap(box, chunk.box)]
        assert (set(got), len(got)) == (wanted, len(wanted))
        assert found.chunks[name], "no row for the shape and the dtype"


def test_a_rank_of_the_same_world_reads_its_own_fragment():
    version = Saved({"a": 1600, "b": 3200}, 160, per_node=8)
    version.find(43, 160)
    assert version.read == [5]


@pytest.mark.parametrize(("world", "most"), [(80, 2), (320, 1), (240, 2)])
def test_another_even_world_size_reads_few_fragments(world, most):
    version = Saved({"a": 9600, "b": 19200}, 160, per_node=8)
    version.find(world // 2, world)
    assert len(version.read) <= most + 2  # also the fragments of the rank with the same number and of rank 0


def test_uneven_parts_are_estimated_from_found_rows():
    """Of 5,001 elements, each of 2,000 ranks has three until all are used, and each of 1,400 ranks has four."""
    version = Saved({"a": 5_001}, 2_000, per_node=4)
    found = version.find(1_200, 1_400)
    assert sorted(chunk.offset for chunk in found.chunks["a"]) == [(4_800,), (4_803,)]
    assert len(version.read) <= 30  # of 500 fragments


def test_small_replicated_tensors_are_found_with_rank_0():
    """Larger tensors are found with the ranks that stored them."""
    version = Saved({"a": 1600}, 160, per_node=8)
    version.rows[0].append(row("norm", 4, ((0,), (4,)), 0))
    version.rows[13].append(row("replica", 4, ((0,), (4,)), 13))
    sought = {
        "a": Sought(True, (1600,), part(1600, 43, 160)),
        "norm": Sought(True, (4,), ((0,), (4,))),
        "replica": Sought(True, (4,), ((0,), (4,)), (43, 107)),
    }
    found = version.finder(43, 160).find(sought)
    assert sorted(found.chunks) == ["a", "norm", "replica"]
    assert version.read[0] == 5
    assert len(version.read) <= 5


def test_a_missing_tensor_is_searched_in_all_fragments():
    version = Saved({"a": 160}, 160, per_node=8)
    found = version.finder(0, 160).find({"b": Sought(True, (3,), ((0,), (3,)))})
    assert sorted(version.read) == list(range(20))
    assert "b" not in found.chunks
    assert found.names == {"a"}


def test_read_all_reads_each_remaining_fragment_once():
    version = Saved({"a": 160}, 160, per_node=8)
    version.rows[11].append(row("b", 4, ((0,), (4,)), 11))
    version.values[0] += [value("epoch", 1, *range(160)), value("of another", 2, 3)]
    version.values[7].append(value("of mine", 3, 60))
    finder = version.finder(60, 160)
    finder.find({"a": Sought(True, (160,), part(160, 60, 160))})
    assert version.read == [7]
    for _ in range(2):
        found = finder.read_all()
        assert (found.names, found.ranks.names) == ({"a", "b"}, {"epoch", "of another", "of mine"})
        assert {name for name, row in found.values.items() if 60 in row.ranks} == {"epoch", "of mine"}
        assert sorted(version.read) == list(range(20))


def test_all_is_read_for_lost_values_only_if_tensors_are_missing():
    """The rank has saved a container with other values, and all tensors are found: no fragment has the value that is sought."""
    version = Saved({"a": 160}, 160, per_node=8)
    version.values[7].append(Value("list.0", path_text(("list", ("list", 0))), "3", (60,)))
    infos = [FragmentInfo(node, 0, "", tuple(of), 1, 0, 0) for node, of in enumerate(version.nodes)]
    sought = {"a": Sought(True, (160,), part(160, 60, 160)), "list": Sought(container="list"), "list.1": Sought(container="list")}
    for raw, read in ((160, [7]), (161, list(range(20)))):
        version.read.clear()
        finder = Finder(infos, version.read_fragment, Seeker(60, 160, 160), raw)
        found = finder.find(sought)
        assert ({*found.values}, sorted(version.read)) == ({"list.0"}, read)
        assert finder.complete


def test_rows_of_another_shape_are_returned():
    version = Saved({"a": 160}, 16)
    found = version.finder(15, 16).find({"a": Sought(True, (320,), ((300,), (20,)))})
    assert found.chunks["a"][0].shape == (160,)


def test_a_tensor_of_unknown_shape_is_found_whole():
    version = Saved({"a": 160}, 16)
    found = version.finder(15, 16).find({"a": Sought()})
    assert sum(chunk.extent[0] for chunk in found.chunks["a"]) == 160


def value(name: str, thing: object, *ranks: int) -> Value:
    return Value(name, path_text((name,)), json.dumps(thing), ranks)


def test_a_new_rank_gets_the_values_of_the_lowest_rank():
    version = Saved({}, 6, per_node=2)
    version.nodes = [range(0, 6, 3), range(1, 6, 3), range(2, 6, 3)]
    version.values = [
        [value("epoch", 0, 0), value("epoch", 3, 3), value("seen", 30, 3)],
        [value("epoch", 1, 1, 4), value("seen", 10, 4)],
        [value("epoch", 2, 2, 5), value("seen", 20, 2)],
    ]
    wanted = {"epoch": Sought(), "seen": Sought()}
    assert {name: v.text for name, v in version.finder(4, 6).find(wanted).values.items()} == {"epoch": "1", "seen": "10"}
    assert version.read == [1]
    assert {name: v.text for name, v in version.finder(7, 8).find(wanted).values.items()} == {"epoch": "0", "seen": "20"}


def test_contradictory_rows_are_damage():
    version = Saved({"a": 160}, 16)
    version.rows[7] = [row("a", 160, chunk.box, 7, dtype="int8") for chunk in version.rows[7]]
    with pytest.raises(Damaged, match="disagree"):
        version.find(0, 1)


def test_few_fragments_are_read_for_optimizers() -> None:
    """The states of parameters, whose names a new optimizer does not know."""
    saved = Saved({"w": 640, "optim.state.w.m": 640, "optim.state.w.v": 640}, 64)
    for node, ranks in enumerate(saved.nodes):
        saved.values[node].append(Value("optim.lr", path_text(("optim", "lr")), "1", tuple(ranks)))
    for world in (64, 128, 48):
        saved.read.clear()
        mine = Sought(True, (640,), part(640, 5, world))
        sought = {"w": mine, "optim": Sought(beneath=True, like={"optim.state.w": mine})}
        found = saved.finder(5, world, 3 * 640).find(sought).chunks
        assert len(saved.read) <= 6
        assert found.keys() == saved.sizes.keys()
        for rows in found.values():
            assert mine.box is not None
            parts = [common for chunk in rows if (common := overlap(mine.box, chunk.box)) is not None]
            assert sum(extent[0] for _, extent in parts) == mine.box[1][0]
            assert len(rows) <= 4


def test_other_tensors_of_optimizers_are_found() -> None:
    saved = Saved({"w": 640, "optim.state.w.m": 640}, 64)
    box = (0,), (3,)
    saved.rows[20].append(row("optim.state.w.rows", 3, box, 20))
    saved.rows[30].append(row("optim.state.empty.m", 0, ((0,), (0,)), 30))
    mine = Sought(True, (640,), part(640, 5, 64))
    nothing = Sought(True, (0,), ((0,), (0,)))
    for like in ({"optim.state.w": mine}, {"optim.state.w": mine, "optim.state.empty": nothing}):
        found = saved.finder(5, 64, 2 * 640 + 3).find({"w": mine, "optim": Sought(beneath=True, like=like)}).chunks
        assert [chunk.box for chunk in found["optim.state.w.rows"]] == [box]
    assert found["optim.state.empty.m"]


def test_parts_of_a_rank_are_with_its_node() -> None:
    saved = Saved({"w": 640}, 64)
    for rank in range(64):
        saved.rows[rank // 2].append(row(f"own.[rank {rank}]", 2, ((0,), (2,)), rank // 2))
    mine = Sought(True, (640,), part(640, 5, 64))
    found = saved.finder(5, 64).find({"w": mine, "own": Sought(beneath=True, own=True)})
    assert saved.read == [2]
    assert {"own.[rank 4]", "own.[rank 5]"} < found.chunks.keys()
