"""Ranks of plain process groups, as torchrun starts them: separate processes that communicate over gloo, without Ray."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

PATIENCE = datetime.timedelta(seconds=60)
_METHODS = multiprocessing.get_context("forkserver")
_METHODS.set_forkserver_preload(["integration.gloo_preload"])


class RankFailed(Exception):
    """A rank raised an exception (its traceback is the message) or died."""


def _start_server() -> None:
    """Start the process that forks the ranks. Python 3.11 passes it no path, and it skips modules that it does not find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            where, rank, n, what, args = pipe.recv()
        except EOFError:
            return
        dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=n, timeout=PATIENCE)
        try:
            pipe.send((True, what(rank, n, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            dist.destroy_process_group()


class Ranks:
    """Processes, of which the first ``n`` form a process group for each call. A call starts missing processes."""

    def __init__(self, folder: Path) -> None:
        _start_server()
        self._folder, self._calls = folder, 0
        self.members: list[tuple[Any, Connection]] = []

    def call(self, n: int, what: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """Call ``what(rank, n, *args)`` on ``n`` ranks and return the results; raise ``RankFailed`` if a rank fails."""
        self.members = [member for member in self.members if member[0].is_alive()]
        while len(self.members) < n:
            here, there = _METHODS.Pipe()
            process = _METHODS.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.members.append((process, here))
        self._calls += 1
        where = str(self._folder / f"group-{self._calls}")
        for rank, (_, pipe) in enumerate(self.members[:n]):
            pipe.send((where, rank, n, what, args))
        answers = [self._answer(rank, pipe, timeout) for rank, (_, pipe) in enumerate(self.members[:n])]
        if bad := [text for good, text in answers if not good]:
            raise RankFailed("\n".join(bad))
        return [answer for _, answer in answers]

    @staticmethod
    def _answer(rank: int, pipe: Connection, timeout: float) -> tuple[bool, Any]:
        if not pipe.poll(timeout):
            return False, f"rank {rank} says nothing for {timeout} s"
        try:
            answer: tuple[bool, Any] = pipe.recv()
            return answer
        except (EOFError, ConnectionResetError):
            return False, f"rank {rank} died"

    def close(self) -> None:
        for process, pipe in self.members:
            pipe.close()
            process.kill()
            process.join()


def die() -> None:
    """Kill this process with SIGKILL, as the operating system would."""
    os.kill(os.getpid(), signal.SIGKILL)
