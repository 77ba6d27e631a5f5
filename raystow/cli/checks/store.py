"""Checks of the object store at an address: access, safety of commits, speed and clock.

All objects are written below ``probe/doctor-<token>/`` and deleted at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from ...storage.checks.probe import probe_conditional_writes
from ...storage.errors import NotARepository, RaystowError, StoreError
from ...storage.format import keys
from ...storage.object_store import ObjectStore
from ...storage.repository import open_repository
from ...storage.runtime.clock import SYSTEM, Clock
from ...storage.stores import direct_io, open_store
from ..output import count, size
from ..versioned_bucket import NEEDS_A_RULE, keeps_deleted
from .finding import Finding, examined, failed, failure, ok, warning

_ROUNDS = 3
_BULK = 16 << 20  # bytes
_SKEW = 5.0  # seconds; S3 reports whole seconds
_SLOW = 10 << 20  # bytes per second
_LAGGING = 0.5  # seconds for one small request


def check_store(uri: str, clock: Clock = SYSTEM) -> Iterator[tuple[str, Finding]]:
    """Yield findings about the store at ``uri``; stop after one that makes further checks pointless."""
    try:
        store = open_store(uri)
        seconds = _timed(clock, lambda: next(iter(store.list("")), None))
    except RaystowError as error:
        yield "store", failure(error)
        return
    yield "store", ok(f"{store.uri} answers a listing in {_ms(seconds)}")
    yield from examined({"repository": lambda: _repository(uri)})
    try:
        with _workspace(store, clock.token()) as (place, folder):
            yield from _written(place, folder, clock)
    except RaystowError as error:
        yield "clean-up", failure(error)


def _written(place: ObjectStore, folder: str, clock: Clock) -> Iterator[tuple[str, Finding]]:
    """Checks that write to the store."""
    try:
        place.put(f"{folder}first", [b"raystow doctor"])
    except StoreError as error:
        follows = "; ".join(text for text in (error.remedy, "saving will not work, reading may") if text)
        yield "writing", failed(f"{error.subject}: {error.what}", follows)
        return
    yield from examined(
        {
            "conditional writes": lambda: _conditional_writes(place, clock),
            "latency": lambda: _latency(place, f"{folder}small", clock),
            "clock": lambda: _skew(place, f"{folder}clock", clock),
            "throughput": lambda: _throughput(place, f"{folder}bulk", clock),
            **({"deleted objects": lambda: _versioning(place)} if urlsplit(place.uri).scheme == "s3" else {}),
            **({"direct writes": lambda: _direct(place)} if urlsplit(place.uri).scheme == "file" else {}),
        }
    )


def _repository(uri: str) -> Finding:
    try:
        repository = open_repository(uri)
    except NotARepository as error:
        return ok(f"none yet: {error.what}", "the first save creates it")
    versions = repository.versions()
    newest = f", the newest of step {versions[-1].step}" if versions else ""
    return ok(f"{repository.id[:8]}..., {count(len(versions), 'version')}{newest}")


def _conditional_writes(place: ObjectStore, clock: Clock) -> Finding:
    probe_conditional_writes(place, clock)
    return ok("supported: of two writers only one succeeds", "commits are atomic")


def _latency(place: ObjectStore, key: str, clock: Clock) -> Finding:
    puts, gets = [], []
    for _ in range(_ROUNDS):
        puts.append(_timed(clock, lambda: place.put(key, [b"x" * 100])))
        gets.append(_timed(clock, lambda: place.get(key, max_bytes=1000)))
    found = f"a small put takes {_ms(median(puts))}, a small get {_ms(median(gets))}"
    if max(median(puts), median(gets)) > _LAGGING:
        return warning(found, "a commit takes about ten such requests: is the store in this region?")
    return ok(found)


def _skew(place: ObjectStore, key: str, clock: Clock) -> Finding:
    before = clock.now()
    place.put(key, [b"x"])
    after = clock.now()
    modified = next(info.modified for info in place.list(key))
    skew = 0.0 if before - 1 <= modified <= after + 1 else modified - (before + after) / 2
    if abs(skew) > _SKEW:
        found = f"the store's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
        follows = "synchronize the clocks by NTP: ages and grace periods are wrong, and S3 refuses requests that are 15 min off"
        return warning(found, follows)
    return ok(f"the store's and this machine's agree within {max(1.0, abs(skew)):.0f} s")


def _throughput(place: ObjectStore, key: str, clock: Clock) -> Finding:
    data = blake3(clock.token().encode()).digest(length=_BULK)  # random, so that nothing can compress it
    put = _BULK / _timed(clock, lambda: place.put(key, [data]))
    got: list[bytes] = []
    get = _BULK / _timed(clock, lambda: got.append(bytes(place.get_range(key, 0, _BULK))))
    if got[0] != data:
        return failed("16 MiB were read back changed", "do not use this store or network")
    found = f"16 MiB: put at {size(put)}/s, get at {size(get)}/s (one object at a time; saves use several)"
    return warning(found, "saves and restores will be slow") if min(put, get) < _SLOW else ok(found)


def _versioning(place: ObjectStore) -> Finding:
    if keeps_deleted(place):
        return warning("the bucket is versioned: what raystow deletes still takes space", NEEDS_A_RULE)
    return ok("free their space")


def _direct(place: ObjectStore) -> Finding:
    why = direct_io.refused(os.stat(unquote(urlsplit(place.uri).path)).st_dev)
    return ok("used: packs go from memory to the disk around the page cache" if why is None else why)


@contextlib.contextmanager
def _workspace(store: ObjectStore, token: str) -> Iterator[tuple[ObjectStore, str]]:
    """Yield a store to write into and the prefix of keys to use; delete everything afterwards.

    The store is separate from the repository's: on a file system its lock file can be deleted too, unlike the repository's.
    """
    below = f"{keys.PROBE}doctor-{token}"
    kind = urlsplit(store.uri).scheme
    if kind == "memory":
        place, folder = store, f"{below}/"
    else:
        place, folder = open_store(f"{store.uri}/{below}"), ""
    root = Path(unquote(urlsplit(store.uri).path)) if kind == "file" else None
    made = [path for path in (root, *root.parents) if not path.exists()] if root else []
    try:
        yield place, folder
    finally:
        place.delete([info.key for info in place.list(folder)])
        if root:
            shutil.rmtree(root / below, ignore_errors=True)
            for path in (root / keys.PROBE, *made):  # deepest first; one that is in use by now stays
                with contextlib.suppress(OSError):
                    os.rmdir(path)


def _timed(clock: Clock, work: Callable[[], object]) -> float:
    start = clock.monotonic()
    work()
    return max(1e-6, clock.monotonic() - start)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f} ms"
