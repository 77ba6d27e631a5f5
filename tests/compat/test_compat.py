"""Stored repositories stay readable, by raystow and by an independent reader."""

import ast
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from helpers.builders import whole, write
from helpers.local_cluster import LocalCluster

import raystow
from compat import reader
from raystow.state.shards import bits
from raystow.storage.commit.committer import Committer
from raystow.storage.format import values
from raystow.storage.repository import create_repository

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
DELTAS = HERE / "golden-deltas"
PACKS = HERE / "golden-packs"


def raw_bytes(value: object) -> bytes:
    return bits(value).tobytes() if isinstance(value, torch.Tensor) else value.tobytes()


def digests(tensors: dict) -> dict[str, str]:
    return {name: blake3(raw_bytes(value)).hexdigest() for name, value in tensors.items()}


def test_the_reader_shares_no_code_with_raystow():
    allowed = {"json", "sys", "zlib", "math", "pathlib", "numpy", "pyarrow", "zstandard", "blake3"}
    imported = set()
    for node in ast.walk(ast.parse((HERE / "reader.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.add(node.module.split(".")[0])
    assert imported <= allowed


@pytest.mark.parametrize("version", EXPECTED)
def test_the_reader_reads_the_golden_repository(version):
    tensors = reader.read(GOLDEN, int(version))
    wanted = EXPECTED[version]["tensors"]
    assert digests(tensors) == {name: digest for name, (_, _, digest) in wanted.items()}
    assert {name: list(array.shape) for name, array in tensors.items()} == {name: shape for name, (_, shape, _) in wanted.items()}


def test_the_reader_takes_the_newest_version():
    assert reader.read(GOLDEN).keys() == EXPECTED["3"]["tensors"].keys()


@pytest.mark.parametrize("version", EXPECTED)
def test_raystow_reads_the_golden_repository(version):
    repository = raystow.open(GOLDEN)
    held = repository.version(int(version))
    wanted = EXPECTED[version]["tensors"]
    assert {name: [info.dtype, list(info.shape)] for name, info in held.tensors().items()} == {
        name: [dtype, shape] for name, (dtype, shape, _) in wanted.items()
    }
    assert digests({name: held.read(name) for name in wanted}) == {name: digest for name, (_, _, digest) in wanted.items()}
    for rank, plain in enumerate(EXPECTED[version]["values"]):
        read = held.values(rank)
        assert {name: values.dumps(read[name]) for name in plain} == plain
    repository.verify(held)


def test_golden_covers_every_dtype_codec_and_transform():
    """The golden repository also contains a pin and metrics."""
    from raystow.storage.coding.dtypes import DTYPES

    repository = raystow.open(GOLDEN)
    versions = repository.versions()
    chunks = [chunk for version in versions for rows in version.chunks.values() for chunk in rows]
    assert {chunk.dtype for chunk in chunks} == set(DTYPES)
    assert {codec for chunk in chunks for codec in chunk.coding.codecs} == {"raw", "zstd", "deflate", "pack7"}
    assert {(c.coding.planes, c.coding.rotated) for c in chunks} == {(False, False), (True, False), (True, True)}
    assert [version.step for version in versions] == [10, 20, 30]
    assert repository.root().pins == {"best": 1}
    assert values.dumps(versions[0].metrics["bad"]) == '{"float": "7ff8000000000000"}'


def test_the_reader_reads_a_new_repository(tmp_path):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(700, 900, generator=generator)
    state = {
        "w": weight.bfloat16(),
        "big": torch.randn(1200, 1024, generator=generator),  # more than one chunk
        "second_moment": weight.square().bfloat16(),
        "counts": np.arange(100_000) // 7,
        "half": weight[:33, :31].T.half(),
        "empty": torch.empty(3, 0),
        "scalar": np.float64(1.5),
    }
    with LocalCluster(str(tmp_path / "run"), nodes=2) as cluster:
        cluster.save_all([state, state], step=1)
    read = reader.read(tmp_path / "run")
    assert digests(read) == digests(state)
    assert len(raystow.open(tmp_path / "run").latest().chunks["big"]) > 1


@pytest.mark.parametrize("version", [1, 2])
def test_records_without_packs_are_readable(version):
    wanted = json.loads((PACKS / "expected.json").read_text())[str(version)]
    assert digests(reader.read(PACKS, version)) == wanted
    repository = raystow.open(PACKS)
    held = repository.version(version)
    assert digests({name: held.read(name) for name in wanted}) == wanted
    assert held.record.packs is None
    assert repository.verify(held, deep=True).packs == len([*held.packs]) == held.record.pack_count
    assert [chunk.is_reference for chunk in held.chunks["mask"]] == [version == 2]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_golden_deltas_are_readable(version):
    wanted = json.loads((DELTAS / "expected.json").read_text())[str(version)]
    assert digests(reader.read(DELTAS, version)) == wanted
    repository = raystow.open(DELTAS)
    held = repository.version(version)
    assert digests({name: held.read(name) for name in wanted}) == wanted
    repository.verify(held)
    bases = {name: {chunk.coding.base for chunk in rows} for name, rows in held.chunks.items()}
    assert bases == {name: {version - 1 or None} if name != "few" else {None} for name in wanted}


def test_the_reader_reads_a_chain_of_deltas(tmp_path):
    """The chain has three versions and tensors of every word width."""
    random, committer = np.random.default_rng(3), Committer(create_repository(str(tmp_path / "run")), "me")
    first = {name: random.integers(0, 200, 9000 * 8, np.uint8).view(name) for name in ("uint8", "int16", "uint32", "float64")}
    states = [
        first,
        *(
            {n: (v.view(f"u{v.itemsize}") + np.array(k, f"u{v.itemsize}")).view(v.dtype) for n, v in first.items()}
            for k in (1, 2)
        ),
    ]
    for i, state in enumerate(states):
        cuts = {name: whole(array) for name, array in state.items()}
        write(committer, cuts, base=(i, states[i - 1]) if i else None)
    for i, state in enumerate(states, 1):
        assert digests(reader.read(tmp_path / "run", i)) == digests(state)
    newest = raystow.open(tmp_path / "run").latest()
    assert {chunk.coding.base for rows in newest.chunks.values() for chunk in rows} == {2}


def test_the_reader_detects_a_flipped_bit(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "run")
    for path in [*tmp_path.glob("run/*.json"), *tmp_path.glob("run/versions/00000002*/*")]:
        if path.name == "expected.json":
            continue
        whole = path.read_bytes()
        for at in {0, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises((AssertionError, ValueError)):
                reader.read(tmp_path / "run", 2)
        path.write_bytes(whole)
    reader.read(tmp_path / "run", 2)


@pytest.mark.parametrize("golden", [GOLDEN, DELTAS], ids=lambda folder: folder.name)
def test_a_reader_without_rollbacks_reads_the_chosen_version(tmp_path, golden):
    """The independent reader ignores the field ``rolled_back``: it sees rolled-back versions as removed."""
    shutil.copytree(golden, tmp_path / "run")
    repository = raystow.open(tmp_path / "run")
    wanted = digests(reader.read(golden, 2))
    assert [version.id for version in repository.rollback(2)] == [3]
    assert digests(reader.read(tmp_path / "run")) == wanted
    repository.verify(repository.version(3))
    repository.rollback(3)
    assert digests(reader.read(tmp_path / "run")) == digests(reader.read(golden))
