"""Decoding returns every encoded bit; digests and kernels agree with the code in the specification."""

from __future__ import annotations

import math
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from raystow.storage.coding import kernels
from raystow.storage.coding.chunk import ChunkEncoder, Coding, decode, packed
from raystow.storage.coding.digest import raw_digest
from raystow.storage.coding.dtypes import DTYPES, DType, dtype
from raystow.storage.errors import Damaged, Unsupported
from raystow.storage.format import values

SPEC_FILE = Path(__file__).parents[2] / "docs" / "spec" / "format-v1.md"
SPEC: dict[str, Any] = {}
for _block in re.findall(r"```python spec\n(.*?)```", SPEC_FILE.read_text(), re.DOTALL):
    exec(_block, SPEC)

ENCODER = ChunkEncoder(1 << 20)
LAYOUTS = sorted({(d.itemsize, d.width, d.rotate) for d in DTYPES.values()})
quick = settings(max_examples=60, deadline=None)


def content(kind: str, size: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return ``size`` bytes of a kind that occurs in tensors."""
    random = np.random.default_rng(seed)
    if kind == "random":
        return random.integers(0, 256, size, np.uint8)
    if kind == "constant":
        return np.full(size, seed % 256, np.uint8)
    if kind == "even":
        return random.integers(0, 128, size, np.uint8) * np.uint8(2)
    if kind == "late odd":  # even except for one byte, which a sample may miss
        even = random.integers(0, 128, size, np.uint8) * np.uint8(2)
        even[size * 2 // 3 : size * 2 // 3 + 1] |= 1
        return even
    if kind == "text":
        return np.resize(np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 7, np.uint8), size)
    numbers = random.normal(0, 0.02, size // 2 + 1).astype(np.float32)
    if kind == "squares":
        numbers = numbers**2
    if kind == "nans":
        numbers.view(np.uint32)[::3] |= np.uint32(0x7F800000)
    if kind == "bf16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:size].copy()
    return numbers.view(np.uint8)[:size].copy()


contents = st.builds(
    content,
    st.sampled_from(["random", "constant", "even", "late odd", "text", "normal", "squares", "nans", "bf16"]),
    st.integers(0, 3000) | st.sampled_from([1023, 1024, 65_536, 65_537, 131_071, 300_001, 700_000]),
    st.integers(0, 2**32),
)


def round_trip(raw: np.ndarray[Any, Any], kind: DType) -> Coding:
    stored, coding = ENCODER.encode(raw, kind)
    assert coding.size == stored.size
    assert stored.size <= raw.size + raw.size // 100 + 512
    decoded = np.empty(raw.size + 1, np.uint8)[1:]  # an unaligned address
    decode(coding, kind, np.frombuffer(stored.tobytes(), np.uint8), decoded)
    assert decoded.tobytes() == raw.tobytes()
    return coding


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=25, deadline=None)
@given(raw=contents)
def test_a_chunk_is_decoded_bit_for_bit(layout: tuple[int, int, bool], raw: np.ndarray[Any, Any]) -> None:
    kind = next(d for d in DTYPES.values() if (d.itemsize, d.width, d.rotate) == layout)
    round_trip(raw[: raw.size // kind.itemsize * kind.itemsize], kind)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_decoded_bit_for_bit(name: str) -> None:
    for seed, kind in enumerate(("random", "normal", "squares", "constant", "even")):
        round_trip(content(kind, 9 * 1024 + 16 * seed, seed), dtype(name))


def test_each_plane_gets_the_codec_that_saves_bytes() -> None:
    """The planes of exponents are compressed, those of mantissas stay raw, and a constant bit is dropped."""
    weights, moments = content("bf16", 1 << 18, 1), content("bf16", 1 << 18, 1)
    moments.view(np.uint16)[:] &= 0x7FFF
    assert round_trip(weights, dtype("bfloat16")).codecs == ("raw", "zstd")
    assert round_trip(moments, dtype("bfloat16")).codecs == ("pack7", "zstd")
    assert round_trip(content("normal", 1 << 18, 1), dtype("float32")).codecs == ("raw", "raw", "raw", "zstd")
    assert round_trip(content("random", 1 << 18, 1), dtype("float32")).codecs == ("raw",)
    assert round_trip(content("even", 1 << 18, 1), dtype("uint8")).codecs == ("pack7",)


@quick
@given(raw=contents, base=contents, width=st.sampled_from([1, 2, 4, 8]))
def test_deltas_match_the_specification(raw: np.ndarray[Any, Any], base: np.ndarray[Any, Any], width: int) -> None:
    size = min(raw.size, base.size) // width * width
    words, others = (array[:size].view(f"u{width}") for array in (raw, base))
    stored = np.empty_like(words)
    kernels.subtract(words, others, stored)
    assert np.array_equal(stored, SPEC["delta"](words, others))
    assert np.array_equal(SPEC["undelta"](stored, others), words)
    kernels.add(stored, others)
    assert np.array_equal(stored, words)


@quick
@given(
    raw=contents, flaw=st.sampled_from(["streams", "more", "stored", "codec", "stream", "cut", "planes"]), i=st.integers(0, 99)
)
def test_a_wrong_description_raises_an_error(raw: np.ndarray[Any, Any], flaw: str, i: int) -> None:
    kind = dtype("bfloat16")
    raw = raw[: raw.size // 2 * 2]
    stored, coding = ENCODER.encode(raw, kind)
    stored = stored.copy()
    if flaw == "streams":
        assume(coding.streams)
        wrong = structs.replace(coding, streams=coding.streams[:-4])
    elif flaw == "more":
        wrong = structs.replace(coding, streams=coding.streams + packed([1 + i]))
    elif flaw == "stored":
        at = i % len(coding.stored)
        wrong = structs.replace(coding, stored=tuple(n + (p == at) for p, n in enumerate(coding.stored)))
    elif flaw == "codec":
        wrong = structs.replace(coding, codecs=("lzw", *coding.codecs[1:]))
    elif flaw == "stream":
        wrong = structs.replace(coding, stream=-i)
    elif flaw == "cut":
        assume(stored.size)
        stored, wrong = stored[:-1], coding
    else:
        wrong = structs.replace(coding, planes=not coding.planes)
    with pytest.raises((Damaged, Unsupported)):
        decode(wrong, kind, stored, np.empty(raw.size, np.uint8))


@quick
@given(data=st.binary(max_size=64), size=st.integers(0, 300))
def test_arbitrary_bytes_raise_only_damaged(data: bytes, size: int) -> None:
    for codec in ("zstd", "deflate", "pack7", "raw"):
        streams = packed([len(data)]) if codec in ("zstd", "deflate") else b""
        coding = Coding(False, False, (codec,), (len(data),), streams)
        try:
            decode(coding, dtype("uint8"), np.frombuffer(data, np.uint8), np.empty(size, np.uint8))
        except Damaged:
            pass


def deflated(data: bytes, *, end: bool = True) -> bytes:
    deflater = zlib.compressobj(6, zlib.DEFLATED, -15)
    return deflater.compress(data) + deflater.flush(zlib.Z_FINISH if end else zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize("length", [1, 999, 65_536])
def test_a_deflate_stream_of_another_length_raises_damaged(length: int) -> None:
    text = content("text", length + 1, 0).tobytes()
    raw = np.empty(length, np.uint8)

    def inflate(stream: bytes) -> None:
        coding = Coding(False, False, ("deflate",), (len(stream),), packed([len(stream)]))
        decode(coding, dtype("uint8"), np.frombuffer(stream, np.uint8), raw)

    inflate(deflated(text[:length]))
    assert raw.tobytes() == text[:length]
    for wrong in (
        deflated(text),
        deflated(text[: length - 1]),
        deflated(text[:length], end=False),
        deflated(text[:length])[:-1],
        b"",
    ):
        with pytest.raises(Damaged):
            inflate(wrong)


def pure_digest(raw: bytes) -> int:
    """Compute ``raw_digest`` by its definition, in Python integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    def key(i: int) -> int:
        return mix((i + 1) * 0x9E3779B97F4A7C15 & mask) | 1

    total = 0
    for at in range(0, len(raw), 4):
        block, i = divmod(at // 4, 16384)
        total += int.from_bytes(raw[at : at + 4], "little") * key(i) * key(2**32 + block)
    return mix(total & mask ^ len(raw) * 0x9E3779B97F4A7C15 & mask)


@quick
@given(raw=st.binary(max_size=400) | contents.map(lambda array: array[:140_000].tobytes()), shift=st.integers(0, 3))
@example(raw=bytes(65_536), shift=0)
@example(raw=bytes(65_535) + b"\1", shift=1)
@example(raw=b"\1" * 65_537, shift=0)
def test_three_raw_digests_agree(raw: bytes, shift: int) -> None:
    array = np.frombuffer(bytes(shift) + raw, np.uint8)[shift:]
    assert raw_digest(array) == SPEC["raw_digest"](raw) == pure_digest(raw)


def test_raw_digests_match_the_vectors_of_the_specification() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `([0-9a-f]{16})` \|$", SPEC_FILE.read_text(), re.MULTILINE)
    assert len(rows) >= 5
    for expression, digest in rows:
        raw = eval(expression)
        assert f"{raw_digest(np.frombuffer(raw, np.uint8)):016x}" == digest, expression


@quick
@given(
    raw=st.binary(min_size=1, max_size=300) | contents.map(lambda a: (a[:200_000] if a.size else a[:0].copy()).tobytes()),
    data=st.data(),
)
def test_a_changed_byte_changes_the_raw_digest(raw: bytes, data: st.DataObject) -> None:
    assume(raw)
    before = raw_digest(np.frombuffer(raw, np.uint8))
    changed = np.frombuffer(raw, np.uint8).copy()
    changed[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    assert raw_digest(changed) != before
    assert raw_digest(np.frombuffer(raw + b"\0", np.uint8)) != before


@quick
@given(raw=contents, width=st.sampled_from([2, 4, 8]), rotate=st.booleans())
def test_planes_match_the_specification(raw: np.ndarray[Any, Any], width: int, rotate: bool) -> None:
    words = raw[: raw.size // width * width].view(kernels.WORDS[width])
    planes = tuple(np.empty(words.size, np.uint8) for _ in range(width))
    kernels.split(words, rotate, planes)
    for ours, theirs in zip(planes, SPEC["split"](words, rotate), strict=True):
        assert np.array_equal(ours, theirs)
    back = np.empty_like(words)
    kernels.join(planes, rotate, back)
    assert np.array_equal(back, words)
    assert np.array_equal(SPEC["join"](planes, rotate), words)


@quick
@given(raw=contents)
def test_packed_planes_match_the_specification(raw: np.ndarray[Any, Any]) -> None:
    plane = raw[: raw.size // 8 * 8] & 0xFE
    packed = np.empty(plane.size // 8 * 7, np.uint8)
    kernels.pack7(plane, packed)
    assert np.array_equal(packed, SPEC["pack7"](plane))
    back = np.empty_like(plane)
    kernels.unpack7(packed, back)
    assert np.array_equal(back, plane)
    assert np.array_equal(SPEC["unpack7"](packed), plane)


def bits_of(value: Any) -> Any:
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, complex):
        return "complex", struct.pack("<dd", value.real, value.imag)
    return type(value), value


any_float = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", n))[0]) | st.floats()
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1]),
    st.integers(2**500, 2**20_000),
    any_float,
    st.builds(complex, any_float, any_float),
    st.text(st.characters(exclude_categories=[])),
    st.binary(),
    st.sampled_from([(), [], {}]),
)
json_forms = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["float", "int", "complex", "bytes", "empty", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(value=plain)
@example(value=math.nan)
@example(value=-0.0)
@example(value=complex(-0.0, -math.inf))
@example(value="\ud800 \udfff \0")
def test_a_plain_value_is_decoded_bit_for_bit(value: Any) -> None:
    text = values.dumps(value)
    assert text.isascii()
    assert bits_of(values.loads(text)) == bits_of(value)


@settings(max_examples=300, deadline=None)
@given(form=json_forms)
def test_any_json_is_a_value_or_raises_damaged(form: Any) -> None:
    try:
        value = values.decode(form)
    except Damaged:
        return
    assert values.is_plain(value) or value in ((), [], {})


@quick
@given(text=st.text())
def test_any_text_is_a_value_or_raises_damaged(text: str) -> None:
    try:
        values.loads(text)
    except Damaged:
        pass


def test_json_that_is_too_deep_raises_damaged() -> None:
    with pytest.raises(Damaged):
        values.loads("[" * 100_000)
