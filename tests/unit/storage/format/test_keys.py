import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystow.storage.errors import Damaged
from raystow.storage.format import keys
from raystow.storage.stores.checks import is_key

ids = st.integers(1, 10**12)
attempts = st.text("0123456789abcdef", min_size=16, max_size=16)
counts = st.integers(0, 10**9 - 1)


def test_keys_have_the_specified_format():
    attempt = "0123456789abcdef"
    assert keys.record(7, attempt) == "versions/00000007-0123456789abcdef/version.json"
    assert keys.fragment(7, attempt, 12) == "versions/00000007-0123456789abcdef/tensors-00012.parquet"
    assert keys.pack(7, attempt, 12, "weights", 3) == "versions/00000007-0123456789abcdef/weights-00012-00003.pack"


@given(ids, attempts, counts, counts)
def test_place_of_returns_the_parts_of_a_key(id, attempt, node, number):
    assert keys.place_of(keys.fragment(id, attempt, node)) == (node,)
    assert keys.place_of(keys.pack(id, attempt, node, "weights_2", number)) == (node, "weights_2", number)
    assert keys.place_of(keys.record(id, attempt)) is None


@given(id=ids, attempt=attempts, node=counts, number=counts)
def test_attempt_of_returns_the_attempt_of_each_object(id, attempt, node, number):
    made = [keys.record(id, attempt), keys.fragment(id, attempt, node), keys.pack(id, attempt, node, "optimizer", number)]
    for key in made:
        assert is_key(key)
        assert key.startswith(keys.prefix(id, attempt))
        assert keys.attempt_of(key) == (id, attempt)
    assert len(set(made)) == 3


ATTEMPT = "0123456789abcdef"
LAYOUT = [
    keys.MARKER,
    keys.ROOT,
    keys.record(7, ATTEMPT),
    keys.signature(7, ATTEMPT),
    keys.fragment(7, ATTEMPT, 12),
    keys.pack(7, ATTEMPT, 12, "weights", 3),
    keys.segment_record(3, ATTEMPT),
    keys.segment_signature(3, ATTEMPT),
    keys.segment_entries(3, ATTEMPT, 5),
    keys.lease(7, ATTEMPT, "f" * 16),
    keys.trial("f" * 16),
    f"probe/doctor-{ATTEMPT}/{ATTEMPT}",
]
"""A key of each kind of object."""

FOREIGN = [
    "data/train.bin",
    "root.json.bak",
    "versions/notes.txt",
    f"versions/00000007-{ATTEMPT}/notes.txt",
    f"versions/00000007-{ATTEMPT}/deeper/weights-00000-00000.pack",
    f"versions/0000007-{ATTEMPT}/version.json",
    f"versions/0000000000-{ATTEMPT}/version.json",
    f"segments/00000003-{ATTEMPT}/entries-5.bin",
    f"segments/00000003-{ATTEMPT}/entries.csv",
    "leases/contract.json",
    "probe/results.csv",
    "probe/doctor-notes/a",
]
"""Keys of other programs."""


@pytest.mark.parametrize("key", LAYOUT)
def test_the_layout_contains_each_kind_of_object_and_its_folders(key):
    folders = [key[:at] for at, character in enumerate(key) if character == "/"]
    assert all(map(keys.in_layout, [key, "", *folders]))


@pytest.mark.parametrize("key", [*FOREIGN, *(f"nested/{key}" for key in LAYOUT), *(f"versions/{key}" for key in LAYOUT)])
def test_the_layout_contains_no_object_of_others(key):
    assert not keys.in_layout(key)


@pytest.mark.parametrize(
    "key", ["root.json", "raystow.json", "versions/", "versions/7-x/a", "probe/0123", "versions/00000007-0123456789abcdef/"]
)
def test_other_keys_belong_to_no_attempt(key):
    assert keys.attempt_of(key) is None


@pytest.mark.parametrize("attempt", ["", "../..", "0123456789ABCDEF", "0123456789abcde", "0123456789abcdef\n", "0" * 17])
def test_an_invalid_attempt_makes_no_key(attempt):
    with pytest.raises(Damaged):
        keys.record(1, attempt)


@pytest.mark.parametrize("group", ["", "..", "a/b", "Weights", "a" * 33, "weights\n", "1st"])
def test_an_invalid_group_makes_no_key(group):
    with pytest.raises(Damaged):
        keys.pack(1, "0" * 16, 0, group, 0)


@pytest.mark.parametrize(("id", "node", "number"), [(0, 0, 0), (-1, 0, 0), (1, -1, 0), (1, 0, -1), (1, 10**9, 0), (1, 0, 10**9)])
def test_a_number_out_of_range_makes_no_key(id, node, number):
    with pytest.raises(Damaged):
        keys.pack(id, "0" * 16, node, "weights", number)


def test_keys_sort_by_id():
    made = [keys.record(id, "f" * 16) for id in (1, 9, 10, 99_999_999)]
    assert made == sorted(made)
