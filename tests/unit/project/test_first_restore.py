"""The first restore of a process: its store calls, its imports and its threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster

UNWANTED = ["IPython", "jinja2", "matplotlib", "numba", "pandas", "pyarrow.dataset", "ray", "rich", "scipy", "typer"]

CHILD = """
import json, sys, threading
from collections import Counter
import torch
before = set(sys.modules)
import raystow
from raystow.storage.stores.local import LocalStore
calls, threads, start = Counter(), [], threading.Thread.start
for name in ("get", "get_range", "get_range_into", "get_tagged", "put", "put_if", "list", "delete"):
    def counted(self, *args, _name=name, _call=getattr(LocalStore, name), **named):
        calls[_name] += 1
        return _call(self, *args, **named)
    setattr(LocalStore, name, counted)
def started(thread):
    threads.append(thread.name)
    start(thread)
threading.Thread.start = started
into = {name: torch.zeros(int(size)) for name, size in json.loads(sys.argv[2]).items()}
assert raystow.restore_latest(sys.argv[1], into) is not None
assert all(bool((one == 1).all()) for one in into.values())
print(json.dumps([calls, threads, sorted(set(sys.modules) - before)]))
"""


@pytest.mark.parametrize(("sizes", "reads"), [({"w": 3000}, 1), ({"model.w": 3000, "optimizer.w": 3000}, 2)])
def test_a_restore_makes_few_calls_imports_and_threads(tmp_path: Path, sizes: dict[str, int], reads: int) -> None:
    with LocalCluster(str(tmp_path)) as cluster:
        cluster.save({name: torch.ones(size) for name, size in sizes.items()}, step=1)
    command = [sys.executable, "-c", CHILD, str(tmp_path), json.dumps(sizes)]
    calls, threads, loaded = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    # Read once each: marker, record, fragment. Read twice: the root, because a version may be dropped before its lease
    # is written. get_tagged reads through get. One range for each pack of at most 16 MiB; the lease is written and deleted.
    assert calls == {"get_tagged": 2, "get": 5, "put": 1, "get_range_into": reads, "delete": 1}
    assert [name for name in UNWANTED if name in loaded] == []
    # A separate thread renews the lease. A pool is started only for several reads.
    assert {name.partition("_")[0] for name in threads} == {"raystow-lease"} | ({"raystow-read"} if reads > 1 else set())
