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


def log_event(folder: Path, event: str, **fields: object) -> None:
    """Append an event of this process with the current time: a whole line, or nothing if the process is killed."""
    line = json.dumps({"event": event, "time": SYSTEM.now(), **fields}) + "\n"
    with open(folder / f"{os.getpid()}.jsonl", "a", buffering=1) as file:
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
