import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from raystow.storage.coding.digest import stored_digest
from raystow.storage.errors import Damaged, Unsupported
from raystow.storage.format import keys, records, values
from raystow.storage.format.replica_difference import ReplicaDifference
from raystow.storage.format.root import Entry, Root
from raystow.storage.format.version_record import FragmentInfo, PackInfo, RestoreInfo, VersionRecord
from raystow.storage.limits import MAX_CHAIN

SPEC = (Path(__file__).parents[4] / "docs" / "spec" / "format-v1.md").read_text()
ENTRY = Entry(1, "0" * 16, "ab" * 32, 663, 100, 1.25, 24, 20)
ROOT = Root("cafe", epoch=3, owner="me", next_id=9, write_id="w", pins={"best": 1, "naïve \ud800": 1}, versions=(ENTRY,))


def sealed(fields: dict) -> bytes:
    """Return a record with these fields and a valid digest line."""
    body = json.dumps({name: value for name, value in fields.items() if name != "digest"})[1:].encode()
    return f'{{"digest": "{stored_digest(body).hex()}",\n'.encode() + body


def test_the_first_line_of_a_record_is_the_digest_of_the_rest():
    data = records.dump({"repository": "cafe"}, keys.MARKER)
    line, _, body = data.partition(b"\n")
    assert line.decode() == f'{{"digest": "{stored_digest(body).hex()}",'
    assert json.loads(data)["repository"] == "cafe"
    assert records.load(data, keys.MARKER) == json.loads(data)


def test_the_examples_of_the_specification_are_valid():
    blocks = dict(re.findall(r"```json (\S+)\n(.*?)\n```", SPEC, re.DOTALL))
    marker = records.load(blocks["raystow.json"].encode(), keys.MARKER)
    root = Root.load(blocks["root.json"].encode())
    data = blocks["version.json"].encode()
    record = VersionRecord.load(data, keys.record(1, root.versions[0].attempt))
    assert marker["repository"] == root.repository == record.repository
    assert (root.versions[0].digest, root.versions[0].size) == (stored_digest(data).hex(), len(data))
    assert record.metrics == {"loss": 2.25}


def test_a_root_survives_dump_and_load():
    assert Root.load(ROOT.dump()) == ROOT


def whole_record() -> VersionRecord:
    return VersionRecord(
        "cafe",
        1,
        "0" * 16,
        3,
        100,
        1.25,
        2,
        {"loss": float("inf"), "n": 2**70, "raw": b"\0"},
        {"raystow": "1"},
        (FragmentInfo(0, 10, "ab" * 32, (0, 1), 3, 24, 20, 0.25), FragmentInfo(1, 10, "cd" * 32, (2,), 3, 24, 20)),
        (PackInfo(0, "weights", 0, 20),),
        {"deflate": "asked for"},
        (RestoreInfo(7, 90, 1.5, 2, 3.25, {"memory": 20, "store": 4}), RestoreInfo(7, 90, 2.5, 2, 0.0)),
        {"exp_avg": "MantissaBits(5)"},
        differences=(
            ReplicaDifference("w", "tensor", (1,), (0, 2), 1, 2, "majority", (3, 4), 1, 1),
            ReplicaDifference("step", "value", (1,), (0,), 1, 1, "each"),
        ),
    )


def test_a_version_record_survives_dump_and_load():
    record = whole_record()
    assert VersionRecord.load(record.dump(), record.key()) == record
    assert record.stall == 0.25


def test_a_record_without_stalls_and_restores_is_read():
    record = whole_record()
    fields = json.loads(record.dump())
    del fields["restores"], fields["lossy"], fields["differences"], fields["fragments"][0]["stall"]
    assert "stall" not in fields["fragments"][1]  # an unknown stall is omitted: readers need not handle null
    old = VersionRecord.load(sealed(fields), record.key())
    assert (old.restores, old.stall, old.lossy, old.differences) == ((), None, {}, ())
    assert "differences" not in json.loads(old.dump())


@pytest.mark.parametrize("wrong", [None, "x", -1, True, [1]])
def test_an_invalid_stall_or_restore_is_damage(wrong):
    record = whole_record()
    fields = json.loads(record.dump())
    stalled = {**fields, "fragments": [{**fields["fragments"][0], "stall": wrong}]}
    restored = [{**fields, "restores": [{**fields["restores"][0], name: wrong}]} for name in fields["restores"][0]]
    for odd in (stalled, *restored, {**fields, "restores": wrong}, {**fields, "restores": [wrong]}):
        with pytest.raises(Damaged):
            VersionRecord.load(sealed(odd), record.key())


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: None} for name in vars(whole_record().differences[0])),
        *({"kind": "weight"}, {"stored": ""}, {"odd": [-1]}, {"others": [10**9]}, {"odd": [0] * 65}, {"name": "n" * 65537}),
        *({"first": [0] * 65}, {"within": -1}, {"elements": True}, {"odd_ranks": "1"}),
    ],
    ids=str,
)
def test_an_invalid_difference_is_damage(wrong):
    record = whole_record()
    fields = json.loads(record.dump())
    odd = {**fields, "differences": [{**fields["differences"][0], **wrong}]}
    with pytest.raises(Damaged):
        VersionRecord.load(sealed(odd), record.key())
    with pytest.raises(Damaged, match="more than 32"):
        VersionRecord.load(sealed({**fields, "differences": fields["differences"][:1] * 33}), record.key())


def test_differences_name_both_sides():
    tensor, value = whole_record().differences
    alone = "rank 1 and ranks 0, 2 differ in w, element [3, 4] alone; the version has the bits of the majority, ranks 0, 2"
    assert str(tensor) == alone
    assert "w, from element [3, 4] on" in str(replace(tensor, elements=0))
    assert "w, from one of 9 elements from [3, 4] on; without" in str(replace(tensor, elements=0, within=9, stored="unknown"))
    assert "rank 1 and 6 more and ranks 0, 2" in str(replace(tensor, odd_ranks=7, stored="minority"))
    assert str(value) == "rank 1 and rank 0 differ in step; the version has each rank's own"


def test_unknown_fields_are_ignored():
    fields = {**json.loads(ROOT.dump()), "future": {"x": 1}}
    assert Root.load(sealed(fields)) == ROOT


def test_another_format_is_refused():
    for key in (keys.MARKER, keys.ROOT, keys.record(1, "0" * 16)):
        with pytest.raises(Unsupported, match=key):
            records.load(sealed({"format": 2, "record": "?"}), key)


@pytest.mark.parametrize("number", [1.0, True, "1", None])
def test_a_format_that_is_not_an_integer_is_damage(number):
    with pytest.raises(Damaged, match="'format'"):
        records.load(sealed({**json.loads(ROOT.dump()), "format": number}), keys.ROOT)


@pytest.mark.parametrize("text", ['"epoch": 3', '"digest": "00"', '"future": {"a": 1, "a": 1}', '"pins": {"x": 1, "\\u0078": 1}'])
def test_a_duplicate_field_name_is_damage(text):
    body = ROOT.dump().split(b"\n", 1)[1].rstrip().removesuffix(b"}") + f", {text}}}".encode()
    with pytest.raises(Damaged, match="occurs twice"):
        Root.load(f'{{"digest": "{stored_digest(body).hex()}",\n'.encode() + body)
    with pytest.raises(Damaged):
        values.loads('{"empty": "dict", "empty": "list"}')


def test_a_record_under_the_key_of_another_is_damage():
    with pytest.raises(Damaged, match=r"raystow\.json"):
        records.load(ROOT.dump(), keys.MARKER)


@pytest.mark.parametrize("data", [b"", b"{", b'{"digest": "', b"null", b"\xff" * 200, b'{"format": 1}'])
def test_data_that_is_not_a_record_is_damage(data):
    with pytest.raises(Damaged, match=r"root\.json"):
        Root.load(data)


@pytest.mark.parametrize("body", [b"", b"}", b'"x": }', b'"x": "\xff"}', b'"x": ' + b"[" * 100_000])
def test_invalid_json_with_a_valid_digest_is_damage(body):
    with pytest.raises(Damaged, match=r"root\.json"):
        Root.load(f'{{"digest": "{stored_digest(body).hex()}",\n'.encode() + body)


@pytest.mark.parametrize("wrong", [None, -1, "x", 1.5, True, [], {}, [3], {"a": -1}, {"a": "b"}])
@pytest.mark.parametrize("name", ["repository", "epoch", "owner", "next_id", "write_id", "pins", "versions"])
def test_a_field_of_the_wrong_kind_is_damage(name, wrong):
    fields = json.loads(ROOT.dump())
    if type(fields[name]) is type(wrong) and wrong in ("x", [], {}):
        return
    with pytest.raises(Damaged, match=r"root\.json"):
        Root.load(sealed({**fields, name: wrong}))


@pytest.mark.parametrize("name", sorted(vars(ENTRY).keys() - {"bases", "groups", "saved"}))
def test_an_entry_without_a_field_is_damage(name):
    fields = json.loads(ROOT.dump())
    del fields["versions"][0][name]
    with pytest.raises(Damaged, match=r"root\.json"):
        Root.load(sealed(fields))


@pytest.mark.parametrize("bases", [{2: 2}, {1: 2, 2: 1}, {id: id - 1 for id in range(2, MAX_CHAIN + 2)}])
def test_a_root_with_an_endless_chain_is_damaged(bases):
    entries = [replace(ENTRY, id=id, bases=(bases[id],) if id in bases else ()) for id in range(1, MAX_CHAIN + 2)]
    with pytest.raises(Damaged, match="is a delta to a later version, or is read through more than"):
        Root.load(Root("cafe", next_id=20, versions=tuple(entries)).dump())
    assert Root.load(Root("cafe", next_id=20, versions=tuple(replace(one, bases=()) for one in entries)).dump())


def test_bases_survive_dump_and_load():
    root = Root("cafe", next_id=6, versions=(ENTRY, replace(ENTRY, id=5, bases=(1, 3))))
    assert Root.load(root.dump()) == root
    info = FragmentInfo(0, 1, "ab" * 32, (), 1, 1, 1, bases=(2,))
    record = VersionRecord(
        "cafe", 7, "0" * 16, 3, 100, 1.25, 2, fragments=(info, replace(info, node=1, bases=(1, 2)), replace(info, bases=()))
    )
    assert VersionRecord.load(record.dump(), record.key()) == record
    assert record.entry(bytes(32), 1).bases == record.bases == (1, 2)


@pytest.mark.parametrize("wrong", [None, 1, "1", [0], [-1], [1.0], [True], [2, 1], [1, 1], [2**63], ["1"], [None]])
def test_bases_that_are_not_ascending_ids_are_damage(wrong):
    fields = json.loads(ROOT.dump())
    fields["versions"][0]["bases"] = wrong
    with pytest.raises(Damaged, match=r"root\.json"):
        Root.load(sealed(fields))


def test_ids_that_do_not_ascend_are_damage():
    with pytest.raises(Damaged, match="ascending"):
        Root.load(Root("cafe", versions=(ENTRY, ENTRY)).dump())


@pytest.mark.parametrize("part", ["fragments", "packs", "metrics", "writer"])
@pytest.mark.parametrize("wrong", [None, 1, "x", [None], [{}], [{"node": -1}], {"x": [1]}])
def test_an_invalid_part_of_a_version_record_is_damage(part, wrong):
    record = VersionRecord("cafe", 1, "0" * 16, 3, 100, 1.25, 2)
    if part == "writer" and wrong == {"x": [1]}:
        return  # the writer field is for people: any text is valid
    with pytest.raises(Damaged):
        VersionRecord.load(sealed({**json.loads(record.dump()), part: wrong}), record.key())
