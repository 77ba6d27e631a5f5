"""A marker, root, version record, value or key with arbitrary content is read or raises a raystow error, in bounded time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fuzz.seeds import MARKER, RECORD, ROOT, planned, seeds
from fuzz.targets import TARGETS, allowed, body, sealed
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.errors import Damaged, StateError
from raystow.storage.format import keys, records, values
from raystow.storage.format.root import Root
from raystow.storage.format.version_record import VersionRecord
from raystow.storage.limits import MAX_DIGITS, MAX_MARKER

checked = settings(max_examples=50, deadline=10_000)
"""Settings with a time-out of 10 seconds for each input."""
RECORDS = {"marker": MARKER, "root": ROOT.dump(), "record": RECORD.dump(), "plan": planned().dump()}
TEXTS = ["value_text", "value_tree", "safetensors"]
"""Targets whose inputs are JSON without the first line of a record."""

# JSON texts to insert into a record, by the placeholder string that each text replaces.
RAW = {
    "@inf": "1e999",
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@digits": "9" * 5000,
    "@int": "1" + "0" * 400,
    "@float": "1" * 400 + ".5",
    "@deep": "[" * 100_000,
    "@nested": '{"a":' * 900 + "1" + "}" * 900,
    "@lists": "[" * 940 + "]" * 940,
    "@twice": '1, "epoch": -1, "id": "x"',
    "@surrogate": '"\\ud800"',
    "@nul": '"\\u0000"',
}
NAMES = ["", "../../x", "/etc/passwd", "..", "a/b", "\0", "é" * 40_000, "x" * 1_000_000, "NaN", "0" * 16, "f" * 64]
HOSTILE = [
    *(None, True, False, -1, 0, 1, 1.5, -0.0, 1e308, 253_402_300_800, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**18),
    *([], {}, [[]], [None], [{}], {"": {}}, {"complex": [1.0, {"complex": []}]}, {"int": "0x" + "f" * 5000}, {"bytes": "é"}),
    *RAW,
    *NAMES,
]
hostile = st.sampled_from(HOSTILE) | st.integers() | st.floats() | st.text(max_size=20)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every node in a JSON tree."""
    yield path
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(child, (*path, key))


def changed(node: Any, path: tuple[Any, ...], change: Any) -> Any:
    """Return the tree with the node at ``path`` changed."""
    if not path:
        return change(node)
    inner = changed(node[path[0]], path[1:], change)
    if isinstance(node, dict):
        return {**node, path[0]: inner}
    return [*node[: path[0]], inner, *node[path[0] + 1 :]]


def grown(node: Any, value: Any) -> Any:
    """Return a container with more and repeated entries; wrap any other value in a list."""
    return (
        {**node, "further": value, "@twice": value}
        if isinstance(node, dict)
        else ([*node, value, *node] if isinstance(node, list) else [node])
    )


def tree_of(kind: str) -> dict[str, Any]:
    """Return a valid input as a tree; a record without its digest."""
    if kind in TEXTS:
        return json.loads(seeds()[kind][0])
    return {name: value for name, value in json.loads(RECORDS[kind]).items() if name != "digest"}


def text(tree: Any) -> bytes:
    """Return a tree as the text below the first line of a record."""
    return json_text(tree)[1:]


def json_text(tree: Any) -> bytes:
    return re.sub(r'"(@\w+)"', lambda found: RAW[found[1]], json.dumps(tree)).encode()


@st.composite
def trees(draw: st.DrawFn, kind: str) -> bytes:
    """Return a valid record with one to three nodes replaced, extended or removed."""
    tree = tree_of(kind)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([p for p in places(tree) if p and p[0] not in ("format", "record")] or [("x",)]))
        value = draw(hostile)
        how = draw(st.sampled_from(["replace", "grow", "remove"]))
        if path == ("x",):
            break  # no node is left to change
        if how == "remove" and isinstance(path[-1], str):
            tree = changed(tree, path[:-1], lambda node, path=path: {k: v for k, v in node.items() if k != path[-1]})
        else:
            tree = changed(tree, path, lambda node, how=how, value=value: grown(node, value) if how == "grow" else value)
    return (json_text if kind in TEXTS else text)(tree)


@pytest.mark.parametrize("kind", [*RECORDS, *TEXTS])
@checked
@given(data=st.data())
def test_hostile_records_raise_only_raystow_errors(kind: str, data: st.DataObject) -> None:
    changed = data.draw(trees(kind))
    allowed(lambda: TARGETS[kind](changed))


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:24])
@pytest.mark.parametrize("kind", ["marker", "root", "record"])
def test_hostile_fields_raise_only_raystow_errors(kind: str, value: Any) -> None:
    tree = tree_of(kind)
    for path in places(tree):
        if path:
            allowed(lambda path=path: TARGETS[kind](text(changed(tree, path, lambda node: value))))


@pytest.mark.parametrize("target", ["any_record", "marker", "root", "record", "value", "key", *TEXTS, "plan", "prune"])
@checked
@given(data=st.data())
def test_changed_bytes_raise_only_raystow_errors(target: str, data: st.DataObject) -> None:
    """The changes are made before the digest is computed, so the digest is valid."""
    seed = data.draw(st.sampled_from(seeds()[target]) | st.binary(max_size=200))
    at = data.draw(st.integers(0, len(seed)))
    inserted = data.draw(
        st.binary(max_size=4) | st.sampled_from([b"[" * 5000, b"\xff", b"\xed\xa0\x80", b"9" * 5000, b'"', b"}"])
    )
    whole = seed[:at] + inserted + seed[at + data.draw(st.integers(0, 4)) :]
    allowed(lambda: TARGETS[target](whole))


values_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["float", "int", "complex", "bytes", "empty", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@checked
@given(tree=values_trees)
def test_any_json_is_a_value_or_raises_a_raystow_error(tree: Any) -> None:
    allowed(lambda: TARGETS["value"](json.dumps(tree).encode()))


# Regressions: each input raised a Python error or was read as a value that was not written.


@pytest.mark.parametrize("raw", ["@int", "@inf", "@nan", "@float", "@infinity"])
def test_an_invalid_time_raises_damaged(raw: str) -> None:
    with pytest.raises(Damaged, match=r"root\.json"):
        Root.load(sealed(text(changed(tree_of("root"), ("versions", 0, "created"), lambda node: raw))))


@pytest.mark.parametrize("rank", ["@inf", "@nan", "1", 1.0, True, -1, 2**40])
def test_an_invalid_rank_raises_damaged(rank: Any) -> None:
    data = sealed(text(changed(tree_of("record"), ("fragments", 0, "ranks"), lambda node: [rank])))
    with pytest.raises(Damaged, match=r"version\.json"):
        VersionRecord.load(data, RECORD.key())


@pytest.mark.parametrize(("path", "number"), [(("world_size",), 10**12), (("fragments", 0, "chunks"), 10**12)])
def test_a_count_out_of_range_raises_damaged(path: tuple[Any, ...], number: int) -> None:
    with pytest.raises(Damaged, match="1000000000000"):
        VersionRecord.load(sealed(text(changed(tree_of("record"), path, lambda node: number))), RECORD.key())


@pytest.mark.parametrize("number", [2**63, "@int"])
def test_an_integer_of_more_than_63_bits_raises_damaged(number: Any) -> None:
    with pytest.raises(Damaged, match=r"root\.json"):
        Root.load(sealed(text({**tree_of("root"), "next_id": number})))


def test_a_deep_tree_in_place_of_a_text_raises_damaged() -> None:
    """Regression: the error message that showed the tree raised a RecursionError."""
    for depth in range(900, 1000):
        whole = text({**tree_of("root"), "owner": "here"}).replace(b'"here"', b"[" * depth + b"]" * depth)
        with pytest.raises(Damaged, match=r"root\.json"):
            Root.load(sealed(whole))


def test_a_deep_metric_raises_damaged() -> None:
    """Python 3.12 parses deeper JSON than its functions may call one another."""
    form: object = 0.0
    for _ in range(5000):
        form = {"complex": [form, 0.0]}
    with pytest.raises(Damaged, match="not a stored value"):
        values.decode(form)


@pytest.mark.parametrize(
    "form",
    [
        "1e999",
        "NaN",
        str(2**63),
        '{"complex": [1, ' + "1" * 400 + "]}",
        '{"complex": [{"complex": [1.0, 1.0]}, 1.0]}',
        '{"complex": ["1.0", 1.0]}',
        '{"int": "1_0"}',
        '{"int": "0x' + "f" * (MAX_DIGITS + 1) + '"}',
        '{"float": " 7ff8000000000000"}',
    ],
    ids=lambda form: form[:30],
)
def test_a_value_form_that_is_never_written_raises_damaged(form: str) -> None:
    with pytest.raises(Damaged):
        values.loads(form)


def test_invalid_utf8_raises_damaged() -> None:
    with pytest.raises(Damaged, match=r"root\.json"):
        Root.load(sealed(body(ROOT.dump()).replace(b'"me"', b'"\xed\xa0\x80"')))


def test_a_writer_rejects_values_that_readers_reject() -> None:
    largest = 16**MAX_DIGITS - 1
    assert values.loads(values.dumps(-largest)) == -largest
    with pytest.raises(StateError, match="bits"):
        values.dumps(largest + 1)
    with pytest.raises(StateError, match=r"raystow\.json"):
        records.dump({"repository": "x" * MAX_MARKER}, keys.MARKER)
