"""An independent reader of raystow repositories, written from ``docs/spec/format-v1.md``. It imports nothing from raystow.

``read(folder)`` returns the tensors of the newest version as numpy arrays and checks every digest. A dtype that numpy lacks is
returned as unsigned integers of the same size. Any deviation from the format raises ``AssertionError``.
"""

import json
import sys
import zlib
from math import prod
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import zstandard
from blake3 import blake3

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NUMPY = {
    *(f"{s}int{n}" for s in ("", "u") for n in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bool",
}
SIZES = {"bfloat16": 2, "complex32": 4, "bits16": 2, **{name: np.dtype(name).itemsize for name in NUMPY}}


def mix(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(start, count):
    return mix((np.arange(start, start + count, dtype=np.uint64) + np.uint64(1)) * GOLDEN) | np.uint64(1)


def raw_digest(raw):
    words = np.frombuffer(raw + bytes(-len(raw) % 65536), "<u4").astype(np.uint64).reshape(-1, 16384)
    sums = (words * keys(0, 16384)).sum(axis=1, dtype=np.uint64)
    total = (sums * keys(1 << 32, len(sums))).sum(dtype=np.uint64, keepdims=True)
    return int(mix(total ^ (np.array([len(raw)], np.uint64) * GOLDEN))[0])


def record(path):
    line, _, body = path.read_bytes().partition(b"\n")
    assert line == b'{"digest": "' + blake3(body).hexdigest().encode() + b'",', f"{path}: damaged"
    fields = json.loads(line + body)
    assert (fields["format"], fields["record"]) == (1, path.name), f"{path}: not a record of format 1"
    return fields


def plane(codec, coded, n, sizes, stream):
    """Decode one plane of n bytes; its stream sizes are taken from the iterator."""
    if codec == "raw":
        decoded = coded
    elif codec == "pack7":
        bits = np.unpackbits(np.frombuffer(coded, np.uint8)).reshape(-1, 7)
        decoded = np.packbits(np.pad(bits, ((0, 0), (0, 1)))).tobytes()
    else:
        decoders = {"zstd": zstandard.ZstdDecompressor().decompress, "deflate": lambda s: zlib.decompress(s, -15)}
        end, parts = 0, []
        for size in [next(sizes) for _ in range(0, n, stream)]:
            parts.append(decoders[codec](coded[end : end + size]))
            end += size
        assert end == len(coded)
        assert {len(part) for part in parts[:-1]} <= {stream}
        decoded = b"".join(parts)
    assert len(decoded) == n
    return np.frombuffer(decoded, np.uint8)


def rounded(words, dtype):
    """Return the bits of float32 words rounded to the nearest bfloat16 or float16."""
    if dtype == "float16":
        return words.astype("<f2")
    bits = words.view("<u4")
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")


def chunk(row, stored, base):
    """Return the decoded bytes of a chunk; ``base(name)`` returns the bytes of its base, from the tensor of that name."""
    assert blake3(stored).digest() == row["stored_digest"], f"{row['name']}: damaged"
    name, transform, codecs = row["dtype"], row["transform"], row["codecs"]
    if transform[:1] in (["copy"], ["rounded:float32"]):
        name, transform = name if transform[0] == "copy" else "float32", transform[1:]
    size, delta, same = SIZES.get(name, 1), transform[:1] == ["delta"], transform == ["same"]
    assert (delta or same) is (row["base"] is not None)
    if same:
        raw = base(row["value"] or row["name"])
        raw = rounded(np.frombuffer(raw, "<f4"), row["dtype"]).tobytes() if name != row["dtype"] else raw
        assert (row["codecs"], row["stored"], raw_digest(raw)) == ([], [], row["raw_digest"]), f"{row['name']}: damaged"
        return raw
    assert transform[delta:] in [[], ["planes"]] or transform == ["rotl1", "planes"]
    word = size // 2 if name.startswith("complex") else size
    width = word if transform[delta:] else 1
    n, end, planes, sizes = prod(row["extent"]) * size // width, 0, {}, iter(row["streams"])
    for p in sorted(range(width), key=lambda p: (codecs[p] != "raw", p)):
        planes[p] = plane(codecs[p], stored[end : end + row["stored"][p]], n, sizes, row["stream"])
        end += row["stored"][p]
    words = np.stack([planes[p] for p in range(width)], axis=1).reshape(-1).view(f"<u{width}")
    if "rotl1" in transform:
        words = (words >> np.array(1, words.dtype)) | (words << np.array(8 * width - 1, words.dtype))
    raw = words.tobytes()
    if delta:
        words, one = np.frombuffer(raw, f"<u{word}"), np.array(1, f"<u{word}")
        former = base(row["value"] or row["name"])
        raw = (np.frombuffer(former, words.dtype) + ((words >> one) ^ (0 - (words & one)))).tobytes()
    if name != row["dtype"]:
        raw = rounded(np.frombuffer(raw, "<f4"), row["dtype"]).tobytes()
    assert (end, next(sizes, None), raw_digest(raw)) == (len(stored), None, row["raw_digest"]), f"{row['name']}: damaged"
    return raw


def rows(folder, version):
    """Yield each chunk row of a version (the newest if None) and the path of its pack."""
    root = record(folder / "root.json")
    assert record(folder / "raystow.json")["repository"] == root["repository"]
    entry = root["versions"][-1] if version is None else next(e for e in root["versions"] if e["id"] == version)
    home = folder / "versions" / f"{entry['id']:08d}-{entry['attempt']}"
    assert blake3((home / "version.json").read_bytes()).hexdigest() == entry["digest"]
    fields = record(home / "version.json")
    for info in fields["fragments"]:
        path = home / f"tensors-{info['node']:05d}.parquet"
        assert blake3(path.read_bytes()).hexdigest() == info["digest"], f"{path}: damaged"
        table = [row for row in pq.read_table(path).to_pylist() if row["kind"] != "value"]
        bases = {row["base"] for row in table} - {None}
        assert (info.get("bases", []), bases - set(entry.get("bases", []))) == (sorted(bases), set())
        if "packs" not in fields:  # the rows name the packs
            ends = {}
            for row in table:
                if row["transform"][-1:] != ["same"]:
                    place = f"{row['group']}-{info['node']:05d}-{row['pack']:05d}.pack"
                    ends[place] = max(ends.get(place, 0), row["start"] + sum(row["stored"]))
            assert len(ends) == info["packs"]
            assert ends == {place: (home / place).stat().st_size for place in ends}, f"{home}: damaged"
        for row in table:
            assert row["base"] is None or row["base"] < entry["id"]
            yield row, home / f"{row['group']}-{info['node']:05d}-{row['pack']:05d}.pack"


def elements(folder, row, pack):
    """Return the bytes of a row's elements; the base of a delta is the same box in an earlier version."""

    def base(name):
        box = name, row["offset"], row["extent"]
        same = [(r, p) for r, p in rows(folder, row["base"]) if (r["name"], r["offset"], r["extent"]) == box]
        assert len(same) == 1, f"{name}: the base of the delta is missing"
        return elements(folder, *same[0])

    if not row["stored"]:
        return chunk(row, b"", base)
    with open(pack, "rb") as file:
        file.seek(row["start"])
        return chunk(row, file.read(sum(row["stored"])), base)


def read(folder, version=None):
    """Return every tensor of a version (the newest by default) as {name: array}."""
    folder, tensors, filled = Path(folder), {}, {}
    for row, pack in rows(folder, version):
        name, dtype = row["name"], np.dtype(row["dtype"] if row["dtype"] in NUMPY else f"u{SIZES.get(row['dtype'], 1)}")
        array = tensors.setdefault(name, np.empty(row["shape"], dtype))
        box = tuple(slice(o, o + e) for o, e in zip(row["offset"], row["extent"], strict=True))
        done = filled.setdefault(name, np.zeros(row["shape"], bool))
        assert not done[box].any(), f"{name}: chunks overlap"
        done[box], array[box] = True, np.frombuffer(elements(folder, row, pack), dtype).reshape(row["extent"])
    assert all(done.all() for done in filled.values())
    return tensors


if __name__ == "__main__":
    for name, array in sorted(read(sys.argv[1]).items()):
        sys.stdout.write(f"{name} {array.dtype} {array.shape} {blake3(array.tobytes()).hexdigest()}\n")
