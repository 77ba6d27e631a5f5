"""A discrete-event scheduler: many greenlets, one at a time, on a clock that advances from event to event.

The code under test blocks in two places only: in calls of its store and in sleeps of its clock. Both call ``pause``. A *process*
is a group of greenlets that freeze and die together.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable

from greenlet import GreenletExit, getcurrent, greenlet

from .random_source import RandomSource


class Process:
    """A group of tasks that freeze and die together."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler, self.name = scheduler, name
        self.alive, self.frozen_until = True, 0.0
        self.tasks: list[Task] = []
        self.waiting: list[Task] = []
        self._stalled: list[tuple[Task, int]] = []

    def __repr__(self) -> str:
        return self.name

    def spawn(self, run: Callable[[], None]) -> Task:
        """Start another task of this process."""
        task = Task(self, run)
        self.tasks = [t for t in self.tasks if not t.dead] + [task]
        self.scheduler.wake(task, 0.0)
        return task

    def wait(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Block the running task until ``tell`` is called and ``reached()`` is true, or the time is over."""
        scheduler, task = self.scheduler, current()
        end = scheduler.time + seconds
        while not reached():
            if scheduler.time >= end:
                return False
            self.waiting.append(task)
            scheduler.pause(end - scheduler.time)
            if task in self.waiting:
                self.waiting.remove(task)
        return True

    def tell(self) -> None:
        """Wake the waiting tasks, which check their conditions again."""
        waiting, self.waiting = self.waiting, []
        for task in waiting if self.alive else ():
            self.scheduler.wake(task, 0.0)

    def freeze(self, seconds: float) -> None:
        """Freeze the process; its due events run after the freeze."""
        self.frozen_until = max(self.frozen_until, self.scheduler.time + seconds)
        self.scheduler.after(seconds, self.thaw)

    def thaw(self, *, now: bool = False) -> None:
        """Resume a frozen process if its time is over, or immediately with ``now``."""
        if now:
            self.frozen_until = self.scheduler.time
        if self.scheduler.time >= self.frozen_until:
            stalled, self._stalled = self._stalled, []
            for task, turn in stalled:
                self.scheduler.after(0.0, functools.partial(self.resume, task, turn))

    def resume(self, task: Task, turn: int) -> None:
        """Run a task until it pauses, unless it has run since this turn was scheduled."""
        if task.turn != turn or task.dead or not self.alive:
            return
        if self.frozen_until > self.scheduler.time:
            self._stalled.append((task, turn))
            return
        task.turn += 1
        task.switch()

    def kill(self) -> None:
        """End all tasks where they are. No call of their cleanup reaches the store."""
        self.alive = False
        self.scheduler.after(0.0, self._reap)
        running = getcurrent()
        if isinstance(running, Task) and running.process is self:
            raise GreenletExit

    def _reap(self) -> None:
        for task in self.tasks:
            if not task.dead:
                task.throw(GreenletExit)


class Task(greenlet):
    """A simulated thread of a process."""

    def __init__(self, process: Process, run: Callable[[], None]) -> None:
        super().__init__(run, parent=process.scheduler.hub)
        self.process, self.turn = process, 0


def current() -> Task:
    """Return the running task."""
    task = getcurrent()
    assert isinstance(task, Task)
    return task


class Scheduler:
    """A queue of events. ``time`` is in seconds since the start; events of the same time run in random order."""

    def __init__(self, rng: RandomSource) -> None:
        self.time = 0.0
        self.hub = getcurrent()
        self._rng = rng
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action that belongs to no process."""
        self._count += 1
        heapq.heappush(self._events, (self.time + seconds, self._rng.between(0.0, 1.0), self._count, action))

    def wake(self, task: Task, seconds: float) -> None:
        """Schedule a task to resume, unless it resumes earlier."""
        turn = task.turn
        self.after(seconds, functools.partial(task.process.resume, task, turn))

    def pause(self, seconds: float) -> None:
        """Suspend the running task for a time."""
        task = current()
        if not task.process.alive:
            raise GreenletExit
        self.wake(task, seconds)
        self.hub.switch()

    def run(self, until: float) -> None:
        """Run events until a time, or until no event is left."""
        while self._events and self._events[0][0] <= until:
            self.time, _, _, action = heapq.heappop(self._events)
            action()
        self.time = until
