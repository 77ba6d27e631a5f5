"""Counts the points that a process passes, and stops it at the target of a trial.

A point is named by the next or last operation there and by the number of passes: ``before put root.json #2``. A process that
reaches its target reports it and stops all of its threads, until the harness has killed the victims.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A point that a process has passed. ``phase``: the phase of the trial when the harness received the point."""

    phase: str
    process: str
    name: str


@dataclass(frozen=True)
class Target:
    """The point of a kill: ``process`` at the point ``name``. ``victims``: the processes to kill."""

    process: str
    name: str
    victims: tuple[str, ...]


class Control:
    """A process's connection to the harness. The process ends with the harness."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._addresses: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._go = threading.Event()
        threading.Thread(target=self._hear, daemon=True).start()

    def send(self, **message: Any) -> None:
        self._end.send(json.dumps(message).encode())

    def receive(self) -> Message:
        return self._inbox.get()

    def ask(self, **question: Any) -> Message:
        """Ask for an address. Any thread may: an answer is never taken for an order."""
        with self._asking:
            self.send(**question)
            return self._addresses.get()

    def halt(self, **message: Any) -> None:
        """Send a message, and stop until the harness sends "go"."""
        self.send(**message)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._go.wait()

    def _hear(self) -> None:
        while data := self._end.recv(1 << 16):
            message = json.loads(data)
            if "go" in message:
                self._go.set()
            else:
                (self._addresses if "address" in message else self._inbox).put(message)
        os._exit(1)


class Tripwire:
    """Called at every point with its label. ``target``: the name of the point to stop at; ``record``: report all points."""

    def __init__(self, control: Control, *, target: str = "", record: bool = False) -> None:
        self._control, self._target, self._record = control, target, record
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, label: str) -> None:
        with self._lock:
            self._passed[label] += 1
            name = f"{label} #{self._passed[label]}" if self._passed[label] > 1 else label
        if self._record:
            self._control.send(point=name)
        if name == self._target:
            self._control.halt(at=name)
