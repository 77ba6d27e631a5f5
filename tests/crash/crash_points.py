"""The crash points: around each store operation, in each step of a local folder, around each call and message between processes,
and around each change of the coordinator's state.

The points are patched into the classes of a process that was forked for one trial.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raystow.orchestrator.coordinator.attempts import Coordinator
from raystow.storage.stores.local import LocalStore
from raystow.storage.stores.s3 import S3Store
from raystow.workers.protocol.unix_channel import Connection

Trip = Callable[[str], None]

_OPERATIONS = ("get", "get_range", "get_range_into", "put", "get_tagged", "put_if", "delete", "abort")
_LISTINGS = ("list", "unfinished")
_CHANGES = ("join", "begin", "begin_part", "finished", "fragment", "failed", "save_failed", "rank_disconnected", "settled")
_EVENTS = {"os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0}
"""Audit event -> index of its path argument."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def watch_stores(trip: Trip) -> None:
    """Add points before and after each operation on a store."""
    for store in (LocalStore, S3Store):
        for name in _OPERATIONS:
            setattr(store, name, _around(getattr(store, name), name, trip))
        for name in _LISTINGS:
            setattr(store, name, _listing(getattr(store, name), name, trip))


def watch_folder(root: Path, trip: Trip) -> None:
    """Add points before each change of a file or folder below ``root``, and in the middle of the first write to each file."""
    below, begun, real_fsync, real_writev = f"{root}/", set[int](), os.fsync, os.writev

    def inside(path: object) -> str:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        return text if text.startswith(below) else ""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and args[2] & _WRITES and (path := inside(args[0])):
            trip(f"open {_short(path.removeprefix(below))}")
        elif event in _EVENTS and (path := inside(args[_EVENTS[event]])):
            trip(f"{event.removeprefix('os.')} {_short(path.removeprefix(below))}")

    def fsync(descriptor: int) -> None:
        begun.discard(descriptor)
        if path := inside(os.readlink(f"/proc/self/fd/{descriptor}") + "/"):
            trip(f"fsync {_short(path.removeprefix(below))}")
        real_fsync(descriptor)

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        path = inside(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path or descriptor in begun:
            return real_writev(descriptor, buffers)
        begun.add(descriptor)
        whole = b"".join(buffers)
        written = real_writev(descriptor, [whole[: len(whole) // 2 or 1]])
        trip(f"half of {_short(path.removeprefix(below))}")
        return written

    sys.addaudithook(audit)
    os.fsync = fsync
    os.writev = writev


def watch_wire(trip: Trip) -> None:
    """Add points before and after each message that a training process or its node worker sends, and after each received one."""
    send, receive = Connection.send, Connection.receive

    def sending(self: Connection, message: object, *, fd: int | None = None) -> None:
        trip(f"before sending {_kind(message)}")
        send(self, message, fd=fd)
        trip(f"after sending {_kind(message)}")

    def receiving(self: Connection, *expected: type, timeout: float | None = None) -> Any:
        found = receive(self, *expected, timeout=timeout)
        if found is not None:
            trip(f"after receiving {_kind(found[0])}")
        return found

    Connection.send = sending
    Connection.receive = receiving


def watch_core(trip: Trip) -> None:
    """Add points before and after each change of the coordinator's state."""
    for name in _CHANGES:
        change = getattr(Coordinator, name)
        setattr(Coordinator, name, _around(change, f"state: {name}", trip, subject=lambda args: ""))


def _around(
    method: Callable[..., Any], name: str, trip: Trip, *, subject: Callable[[tuple[Any, ...]], str] | None = None
) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **more: Any) -> Any:
        if name in ("delete", "abort"):
            args = (list(args[0]), *args[1:])
        label = f"{name} {(subject or _subject)(args)}".rstrip()
        trip(f"before {label}")
        result = method(self, *args, **more)
        trip(f"after {label}")
        return result

    return watched


def _listing(method: Callable[..., Any], name: str, trip: Trip) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(self: Any, *args: Any) -> Iterator[Any]:
        trip(f"before {name} {_subject(args)}".rstrip())
        yield from method(self, *args)
        trip(f"after {name} {_subject(args)}".rstrip())

    return watched


def _subject(args: tuple[Any, ...]) -> str:
    if not args:
        return ""
    if isinstance(args[0], list):
        first = getattr(args[0][0], "key", args[0][0]) if args[0] else ""
        return f"{len(args[0])} {_short(first)}".rstrip()
    return _short(args[0])


def _short(key: str) -> str:
    """Remove the parts of a key that differ between runs: tokens and numbers of nodes."""
    key = re.sub(r"[0-9a-f]{16}", "~", key)
    return re.sub(r"-[0-9]{5}(?=[-.])", "", key, count=1) if key.startswith("versions/") else key


def _kind(message: object) -> str:
    return type(message).__name__
