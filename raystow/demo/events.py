"""The events of the demo: lines of JSON in the files of a folder, one file per process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..storage.runtime.clock import SYSTEM

Event = dict[str, Any]


def select(events: Iterable[Event], kind: str, **fields: object) -> list[Event]:
    """Return the events of a kind whose ``fields`` have these values."""
    return [event for event in events if event["event"] == kind and fields.items() <= event.items()]


class EventLog:
    """Appends events; a line is written whole, or not at all if the process is killed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.jsonl"

    def write(self, event: str, **fields: object) -> None:
        """Append an event with the current time."""
        line = json.dumps({"event": event, "time": SYSTEM.now(), **fields}) + "\n"
        with open(self._path, "a", buffering=1) as file:
            file.write(line)


class EventReader:
    """Reads the new events of all logs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[Path, int]()
        self.seen: list[Event] = []

    def news(self) -> Iterator[Event]:
        """Yield the new events by time; ``seen`` has all events so far."""
        fresh: list[Event] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            text = path.read_text()[self._read.get(path, 0) :]
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            fresh += [json.loads(line) for line in whole.splitlines()]
        fresh.sort(key=lambda event: float(event["time"]))
        self.seen += fresh
        yield from fresh
