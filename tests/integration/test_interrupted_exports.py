"""Exports of a coordinator that is killed: the next one completes them, finds them complete, or deletes their part."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_clock import FakeClock
from helpers.local_cluster import LocalCluster
from transformers import AutoModelForCausalLM

from integration.language_models import gpt2, same
from raystow.orchestrator.coordinator.exports import Exports
from raystow.orchestrator.export.destination import Destination
from raystow.orchestrator.export.hf_folder import HfFolder, plan_folder
from raystow.orchestrator.export.store_folder import MARKER
from raystow.storage.errors import StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.repository import Repository, open_repository
from raystow.storage.retention.export_rule import Export
from raystow.storage.retention.policy import Policy
from raystow.storage.stores import open_store
from raystow.workers.protocol.messages import ExportOrder

SHARD = 20_000
"""Bytes of a file: the models have several."""


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3), "gs", "az"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder, or an address in each kind of object store."""
    return str(tmp_path / "served") if request.param == "folder" else str(request.getfixturevalue(f"{request.param}_uri"))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    with LocalCluster(str(tmp_path / "run")) as cluster:
        cluster.save({"model": gpt2().state_dict()}, step=7)
    return open_repository(str(tmp_path / "run"))


@pytest.fixture
def config() -> bytes:
    return json.dumps(gpt2().config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}).encode()


def run(repository: Repository, served: str, config: bytes, **options: Any) -> Exports:
    """Export what is due."""
    exports = Exports(repository, clock=FakeClock())
    exports.request(ExportOrder(Export(served, max_shard_size=SHARD, **options), {"config.json": config}), None)
    exports.run()
    return exports


def plan(repository: Repository) -> HfFolder:
    return plan_folder(repository.version(1), prefix=None, dtype=None, source=None, limit=SHARD)


def files(place: str) -> dict[str, bytes]:
    """The files of an export, complete or not."""
    if Path(place).parent.is_dir():
        return {path.name: path.read_bytes() for path in Path(place).iterdir()} if Path(place).exists() else {}
    store = open_store(place)
    return {one.key: store.get(one.key, max_bytes=1 << 30) for one in store.list("")}


def loads(place: str, folder: Path) -> bool:
    folder.mkdir()
    for name, data in files(place).items():
        (folder / name).write_bytes(data)
    return same(AutoModelForCausalLM.from_pretrained(folder), gpt2())


_KILLED = """
import importlib, os, signal, sys
from raystow.orchestrator.coordinator.exports import Exports
from raystow.storage.repository import open_repository
from raystow.storage.retention.export_rule import Export
from raystow.workers.protocol.messages import ExportOrder
uri, served, config, where, name, calls = sys.argv[1:]
owner = importlib.import_module(where.partition(":")[0])
owner = getattr(owner, where.partition(":")[2], owner)
left, real = int(calls), getattr(owner, name)
def call(*args, **keywords):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **keywords)
setattr(owner, name, call)
exports = Exports(open_repository(uri))
exports.request(ExportOrder(Export(served, max_shard_size=20_000), {"config.json": config.encode()}), None)
exports.run()
"""

_UPDATE = "raystow.storage.root.root_register:RootRegister", "update"
_WRITE = "raystow.orchestrator.export.version_files"
_CRASHES = {
    "before it is listed as begun": (*_UPDATE, 1),
    "before the first file": (_WRITE, "write_file", 1),
    "between files": (_WRITE, "write_file", 3),
    "before the index": (_WRITE, "write_index", 1),
    "before the config": ("raystow.orchestrator.export.hf_folder:HfFolder", "_copy", 1),
    "before it is noted": (*_UPDATE, 2),
}


@pytest.mark.long
@pytest.mark.parametrize("crash", _CRASHES)
def test_an_export_that_was_killed_is_completed(
    repository: Repository, served: str, config: bytes, tmp_path: Path, crash: str
) -> None:
    words = [str(tmp_path / "run"), served, config.decode(), *map(str, _CRASHES[crash])]
    done = subprocess.run([sys.executable, "-c", _KILLED, *words], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    place, left = f"{served}/version-00000001", files(f"{served}/version-00000001")
    ended = crash == "before it is noted"
    assert (not left or MARKER in left) != ended  # never a part under its final name
    assert repository.root().open_exports == ({} if crash == "before it is listed as begun" else {place: 1})

    run(repository, served, config)
    root = repository.root()
    assert (root.exports, root.open_exports, root.failed_exports) == ({place: 1}, {}, {})
    if ended:
        assert files(place) == left
    assert loads(place, tmp_path / "out")
    if Path(served).exists():
        assert [path.name for path in Path(served).iterdir()] == ["version-00000001"]  # nothing hidden either


@pytest.mark.long
@pytest.mark.parametrize("crash", ["between files", "before it is noted"])
@pytest.mark.parametrize("bits", [None, 5])
def test_an_export_of_a_version_that_was_thinned_is_completed(
    served: str, config: bytes, tmp_path: Path, crash: str, bits: int | None
) -> None:
    """A complete one stays. A part is continued if weights are not rounded; else it is deleted, and a folder is made again."""
    weights = gpt2().state_dict()
    state = {"model": weights, "optim": {name: torch.rand(one.shape) for name, one in weights.items()}}
    with LocalCluster(str(tmp_path / "run")) as cluster:
        cluster.save(state, step=7)
        words = [cluster.uri, served, config.decode(), *map(str, _CRASHES[crash])]
        done = subprocess.run([sys.executable, "-c", _KILLED, *words], capture_output=True, timeout=300)
        assert done.returncode == -signal.SIGKILL, done.stderr
        cluster.save(state, step=8)
    repository, place, newer = open_repository(str(tmp_path / "run")), f"{served}/version-00000001", f"{served}/version-00000002"
    left, before = files(place), repository.root().versions[0]
    repository.store.delete([one.key for one in repository.store.list(keys.LEASES)])  # that of the killed process has ended
    repository.plan_retention(Policy(keep_last=2, resumable=1, mantissa_bits=bits)).execute()
    assert repository.root().versions[0].digest != before.digest
    run(repository, served, config)
    root, ended = repository.root(), crash == "before it is noted"
    stays = ended or bits is None or Path(served).exists()
    assert (root.exports, root.open_exports) == ({place: 1, newer: 2} if stays else {newer: 2}, {})
    assert files(place) == left if ended else bool(files(place)) == stays
    assert not stays or loads(place, tmp_path / "out") == (ended or bits is None)


@pytest.fixture
def begun(repository: Repository, served: str, config: bytes) -> Iterator[str]:
    """The address of an export of version 1 that was begun and killed, and is listed in the root."""
    place = f"{served}/version-00000001"
    repository.register.update(lambda root: replace(root, open_exports={place: 1}))
    with closing(_part(repository, place)) as part:
        next(part)
        if Path(served).exists():  # the part of a killed process has no lock
            (hidden,) = Path(served).iterdir()
            (hidden / "lock").rename(hidden / "of the process")
            (hidden / "lock").touch()
        yield place


def _part(repository: Repository, place: str) -> Iterator[None]:
    made = plan(repository)

    def stop(nbytes: int) -> None:
        raise KeyboardInterrupt

    output = Destination.parse("export", place).new(made.plan)
    write = output.__enter__()
    with pytest.raises(KeyboardInterrupt):
        made.write(lambda name, nbytes, content: write(name, nbytes, content) or stop(nbytes), lambda nbytes: None)
    yield


def _commit(repository: Repository, tmp_path: Path, step: int) -> None:
    with LocalCluster(str(tmp_path / "run")) as cluster:
        cluster.save({"model": gpt2().state_dict()}, step=step)


def test_the_part_of_a_superseded_version_does_not_stay(
    repository: Repository, served: str, config: bytes, tmp_path: Path, begun: str
) -> None:
    """A bucket has a part of another export, without a config: it is deleted. A folder is made again."""
    _commit(repository, tmp_path, 8)
    run(repository, served, config)
    root, newer = repository.root(), f"{served}/version-00000002"
    assert (root.open_exports, root.failed_exports) == ({}, {})
    in_folder = Path(served).exists()
    assert root.exports == ({begun: 1, newer: 2} if in_folder else {newer: 2})
    assert bool(files(begun)) == in_folder
    assert loads(newer, tmp_path / "out")


def test_the_part_of_a_dropped_version_is_deleted(
    repository: Repository, served: str, config: bytes, tmp_path: Path, begun: str
) -> None:
    _commit(repository, tmp_path, 8)
    repository.plan_retention(Policy(keep_last=1)).drop()
    exports = run(repository, served, config)
    root = repository.root()
    assert (root.exports, root.open_exports, root.failed_exports) == ({f"{served}/version-00000002": 2}, {}, {})
    assert not files(begun)
    assert not exports.failures
    if Path(served).exists():
        assert [path.name for path in Path(served).iterdir()] == ["version-00000002"]


def test_the_part_of_another_export_is_kept(repository: Repository, served: str, config: bytes, tmp_path: Path) -> None:
    """Of another repository, which has the same address: only an export of this repository is deleted."""
    with LocalCluster(str(tmp_path / "other")) as cluster:
        cluster.save({"model": gpt2().state_dict()}, step=7)
    place = f"{served}/version-00000001"
    with closing(_part(open_repository(str(tmp_path / "other")), place)) as part:
        next(part)
        before = files(place)
        exports = run(repository, served, config)
        assert exports.waiting
        assert files(place) == before
        assert repository.root().exports == {}
        assert place in repository.root().failed_exports


def test_two_processes_do_not_export_at_once(repository: Repository, served: str, config: bytes, tmp_path: Path) -> None:
    """The earlier one writes a folder on. In an object store the later one continues, and the earlier one stops."""
    place, made = f"{served}/version-00000001", plan(repository)
    first = Destination.parse("export", place).new(made.plan)
    write = first.__enter__()
    (name, nbytes), *_ = made.plan.weights.items()
    if open_store(served).uri.startswith("file"):
        with pytest.raises(StoreUnavailable, match="another process"), Destination.parse("export", place).new(made.plan):
            pass
        made.write(write, lambda nbytes: None)
        first.__exit__(None, None, None)
        return
    with Destination.parse("export", place).new(made.plan) as output:
        with pytest.raises(StoreUnavailable, match="another process"):
            write(name, nbytes, lambda: [bytes(nbytes)])
        made.write(output, lambda nbytes: None)
    with pytest.raises(StoreUnavailable, match="another process"):
        first.__exit__(None, None, None)
    assert files(place).keys() == {*made.plan.weights, *made.plan.others}


def test_a_run_that_was_fenced_exports_nothing(repository: Repository, tmp_path: Path, config: bytes) -> None:
    exports = Exports(repository, clock=FakeClock(), in_charge=lambda root: False)
    exports.request(ExportOrder(Export(str(tmp_path / "served")), {"config.json": config}), None)
    exports.run()
    assert not (tmp_path / "served").exists()
    assert repository.root().open_exports == {}


def test_an_export_elsewhere_is_left(repository: Repository, served: str, config: bytes, tmp_path: Path, begun: str) -> None:
    """Its address is from the root alone, and so may be anybody's."""
    before, elsewhere = files(begun), str(tmp_path / "elsewhere")
    climbing = f"{elsewhere}/../{Path(begun).parent.name}/version-00000001"
    repository.register.update(lambda root: replace(root, open_exports={begun: 1, climbing: 1}))
    run(repository, elsewhere, config)
    assert repository.root().open_exports == {begun: 1, climbing: 1}
    assert [*repository.root().exports] == [f"{elsewhere}/version-00000001"]
    assert files(begun) == before
