"""The processes of a trial, supervised as in a cluster: a coordinator, and two nodes with a training process each. A training may
have a part, on the node of its last rank.

A coordinator or node worker that dies is restarted with empty memory; when a training process or part dies, the whole training is
restarted and restores. Other processes continue. The harness has one thread: ``until`` reads the messages of the processes and
supervises them.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from helpers.polling import wait_until

from crash.processes import Proc, Zygote
from crash.tripwire import Message, Point, Target
from raystow.storage.runtime.clock import SYSTEM

WORLD_SIZE = 2
NODES = [f"node-{rank}" for rank in range(WORLD_SIZE)]
TRAINERS = [f"trainer-{rank}" for rank in range(WORLD_SIZE)]
CLUSTER = ["coordinator", *NODES, *TRAINERS]
PART = f"buffer-{WORLD_SIZE - 1}"
KEEP = 2
_PATIENCE = 60.0  # seconds for a whole trial
_LOG_TAIL = 4000  # characters of each log in a report
_RESTARTS = 6
"""Maximum number of starts of one process in a trial; more starts are a crash loop."""


class Stuck(AssertionError):
    """A trial exceeded its deadline, or a process failed; the message has the stacks and logs of all processes."""


class TrialCluster:
    """``uri``: the repository. ``folder``: for logs. ``target``: only the first process of a name gets it, and it is hit once.
    ``record``: record the passed points. ``keep``: versions that retention keeps, 0 for all. ``journal``: the training records
    its steps, with durable segments. ``parts``: it has a part."""

    def __init__(
        self,
        zygote: Zygote,
        uri: str,
        folder: Path,
        *,
        target: Target | None = None,
        record: bool = False,
        keep: int = KEEP,
        journal: bool = False,
        parts: bool = False,
    ) -> None:
        self._journal = journal
        self.training = [*TRAINERS, PART] if parts else TRAINERS
        self._zygote, self.uri, self._folder, self.target, self._record, self._keep = zygote, uri, folder, target, record, keep
        self._selector = selectors.DefaultSelector()
        self._give_up = SYSTEM.monotonic() + _PATIENCE
        self.processes: dict[str, Proc] = {}
        self._starts: dict[str, int] = {}
        self._waiting: list[tuple[Proc, str]] = []  # processes that requested the address of a node, and the node
        self._port = f"\0raystow-crash-{os.getpid()}-{SYSTEM.token()}"
        self.phase = ""
        self.points: list[Point] = []
        self.hit = False
        self.restored: list[Message] = []

    def start(self, name: str, **more: Any) -> Proc:
        """Start one process."""
        self._starts[name] = self._starts.get(name, 0) + 1
        if self._starts[name] > _RESTARTS:
            raise self.stuck(f"{name} was started {_RESTARTS} times")
        role, _, number = name.partition("-")
        first = self._starts[name] == 1
        target = self.target
        request: Message = {
            "role": role,
            "name": name,
            "uri": self.uri,
            "port": self._port,
            "nodes": NODES,
            "rank": int(number or 0),
            "node": f"node-{number}",
            "world_size": WORLD_SIZE,
            "target": target.name if target is not None and first and target.process == name else "",
            "record": self._record,
            "keep": self._keep,
            "journal": self._journal,
            "parts": ["buffer"] if PART in self.training else [],
            "environment": {key: value for key, value in os.environ.items() if key.startswith("AWS_")},
            **more,
        }
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = os.open(self._folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        proc = Proc(name, self._zygote.fork(request, its, log), mine)
        os.close(log)
        its.close()
        self._selector.register(mine, selectors.EVENT_READ, proc)
        self.processes[name] = proc
        return proc

    def start_cluster(self) -> None:
        """Start all processes, and wait until the training has restored."""
        names = ["coordinator", *NODES, *self.training]
        for name in names:
            if name not in self.processes:
                self.start(name)
        self.until(lambda: all(self._is_ready(name) for name in names), "the cluster to be ready")

    def save(self, step: int, salt: int) -> list[Message]:
        """Let the training save, and return the outcomes that its processes received, also of earlier saves; fewer if it was
        restarted meanwhile, and none of the part while it waits for a later save of the ranks."""
        savers = [self.processes[name] for name in self.training]
        for proc in savers[:WORLD_SIZE]:
            proc.tell(step=step, salt=salt)

        def has_ended(proc: Proc) -> bool:
            return proc.doomed or any(outcome["step"] == step for outcome in proc.said.get("outcome", ()))

        def all_ended() -> bool:
            ranks = savers[:WORLD_SIZE]
            failed = any("error" in outcome for proc in ranks for outcome in proc.said.get("outcome", ()))
            return all(map(has_ended, ranks if failed else savers))

        self.until(all_ended, f"the save of step {step}")
        return [outcome for proc in savers for outcome in proc.said.pop("outcome", ())]

    def record(self, step: int) -> None:
        """Let both ranks record the steps up to ``step``, and wait until the coordinator has settled their segment, or the
        target is hit."""
        coordinator, ranks, hit = self.processes["coordinator"], [self.processes[name] for name in TRAINERS], self.hit
        ready = ranks[0].ready
        assert ready is not None
        for proc in ranks:
            proc.tell(record=step)
        settled = [step, ready["generation"]]
        self.until(lambda: self.hit > hit or settled in coordinator.said.get("settled", ()), f"the segment of step {step}")

    def restart(self, names: Collection[str]) -> None:
        """Kill processes, and wait until the training has restored again."""
        self.kill(names)
        self.start_cluster()

    def steps(self) -> list[int]:
        """Return the step at which the training of each rank continues."""
        return [ready["step"] for name in TRAINERS if (ready := self.processes[name].ready) is not None]

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Supervise the processes until a condition holds; raise ``Stuck`` at the trial's deadline."""
        while not reached():
            left = self._give_up - SYSTEM.monotonic()
            ready = self._selector.select(max(0.0, left))
            if not ready:
                raise self.stuck(f"waited for {what}")
            for key, _ in ready:
                if key.data.control.fileno() >= 0:  # it may have been closed because another process died
                    self._hear(key.data)

    def end(self) -> None:
        """Kill all processes."""
        for proc in list(self.processes.values()):
            proc.kill()
        for proc in list(self.processes.values()):
            self._await_end(proc)

    def stuck(self, what: str) -> Stuck:
        """Return an error with every process's stacks and the ends of the logs."""
        for proc in self.processes.values():
            proc.signal(signal.SIGCONT)
            proc.signal(signal.SIGUSR1)
        SYSTEM.sleep(0.5)  # the end of a stack dump is not observable, so a report may lack some
        logs = [f"--- {path.name}\n{path.read_text()[-_LOG_TAIL:]}" for path in sorted(self._folder.glob("*.log"))]
        return Stuck("\n".join([what, *logs]))

    def _is_ready(self, name: str) -> bool:
        proc = self.processes.get(name)
        return proc is not None and not proc.doomed and proc.ready is not None

    def _hear(self, proc: Proc) -> None:
        data = proc.hear()
        if not data:
            self._ended(proc)
            return
        message = json.loads(data)
        self._pass(proc, message)
        if "at" in message:
            self._strike(proc)
        elif "ready" in message:
            proc.ready = message["ready"]
            if "version" in proc.ready:
                self.restored.append(proc.ready)
            self._answer()
        elif "where" in message:
            self._waiting.append((proc, message["where"]))
            self._answer()
        elif "error" in message and not proc.doomed:
            raise self.stuck(f"{proc.name} has failed: {message['error']}")
        else:
            proc.note(message)

    def _pass(self, proc: Proc, message: Message) -> None:
        if "point" in message:
            self.points.append(Point(self.phase, proc.name, message["point"]))

    def _answer(self) -> None:
        for ask in list(self._waiting):
            proc, node = ask
            if node in self.processes and (ready := self.processes[node].ready) is not None:
                proc.tell(address=ready["address"])
                self._waiting.remove(ask)

    def _strike(self, proc: Proc) -> None:
        """Kill the victims while a process is stopped at the target, and let that process continue if it is not a victim."""
        assert self.target is not None
        self.hit = True
        self.kill(self.target.victims)
        if not proc.doomed:
            wait_until(lambda: proc.stopped, f"{proc} is stopped", pause=0.001)
            proc.signal(signal.SIGCONT)
            proc.tell(go=True)

    def kill(self, names: Collection[str]) -> None:
        """Kill processes; ``until`` handles their ends."""
        for name in names:
            if name in self.processes:
                self.processes[name].kill()

    def _await_end(self, proc: Proc) -> None:
        while data := proc.hear():  # its last messages: a save that it reported must exist
            message = json.loads(data)
            proc.note({kind: value for kind, value in message.items() if kind == "outcome"})
            self._pass(proc, message)
        self._forget(proc)

    def _forget(self, proc: Proc) -> None:
        self._selector.unregister(proc.control)
        proc.control.close()
        self._waiting = [ask for ask in self._waiting if ask[0] is not proc]
        if self.processes.get(proc.name) is proc:
            del self.processes[proc.name]

    def _ended(self, proc: Proc) -> None:
        self._forget(proc)
        if proc.name == "operator":
            return
        if not proc.doomed:
            raise self.stuck(f"{proc.name} has ended by itself")
        if proc.name in self.training:
            for name in self.training:
                if name in self.processes:
                    other = self.processes[name]
                    other.kill()
                    self._await_end(other)
            for name in self.training:
                self.start(name)
        else:
            self.start(proc.name)
