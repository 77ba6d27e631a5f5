"""What the processes of the demo tell each other: lines of JSON in files of one folder, each written by one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...storage.clock import SYSTEM

Event = dict[str, Any]


class Journal:
    """Appends events; a line is written whole or, if the process is killed, not at all."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / f"{os.getpid()}.jsonl"

    def write(self, event: str, **fields: Any) -> None:
        """Note that something happened now."""
        line = json.dumps({"event": event, "time": SYSTEM.now(), **fields}) + "\n"
        with open(self._path, "a", buffering=1) as file:
            file.write(line)


class Follower:
    """Reads what all journals of a folder have said since the last look."""

    def __init__(self, folder: str) -> None:
        self._folder, self._read = Path(folder), dict[Path, int]()
        self.seen: list[Event] = []

    def news(self) -> Iterator[Event]:
        """New events, in order of time."""
        fresh: list[Event] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            text = path.read_text()[self._read.get(path, 0) :]
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            fresh += [json.loads(line) for line in whole.splitlines()]
        fresh.sort(key=lambda event: float(event["time"]))
        self.seen += fresh
        yield from fresh
