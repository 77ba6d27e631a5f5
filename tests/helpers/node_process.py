"""A node worker in a separate process, without Ray; it calls the coordinator over a socket."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from raystow.storage.errors import RaystowError
from raystow.workers.node.node import Node


class PortServer:
    """Serves calls to ``port`` from other processes, each on its own thread, at ``address`` or at a chosen address."""

    def __init__(self, port: Any, address: Any = None) -> None:
        self._port, self._listener, self._open = port, Listener(address, family="AF_UNIX"), True
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> Any:
        return self._listener.address

    def close(self) -> None:
        self._open = False
        with Client(self.address):  # wakes the thread that accepts
            pass

    def _accept(self) -> None:
        while self._open:
            threading.Thread(target=self._serve, args=(self._listener.accept(),), daemon=True).start()
        self._listener.close()

    def _serve(self, caller: Connection) -> None:
        with caller:
            try:
                method, args = caller.recv()
                answer: tuple[Any, RaystowError | None]
                try:
                    answer = getattr(self._port, method)(*args), None
                except RaystowError as error:
                    answer = None, error
                caller.send(answer)
            except (EOFError, OSError):
                pass  # the caller was killed


def _unheard(warning: str) -> None:
    """Stands for a callback, which another process cannot call."""


class RemotePort:
    """The port behind a ``PortServer``."""

    def __init__(self, address: Any) -> None:
        self._address = address

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with Client(self._address) as server:
                server.send((method, tuple(_unheard if callable(arg) else arg for arg in args)))
                result, error = server.recv()
            if error is not None:
                raise error
            return result

        return call


class NodeProcess:
    """A process that starts at construction, and ends with this process at the latest."""

    def __init__(self, name: str, ports: Any, *, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._leash, end = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(name, ports, threads, end), daemon=True)
        self._process.start()
        end.close()
        self.address: str = self._leash.recv()

    def close(self) -> None:
        """Let the process serve its connections for a moment, and end it."""
        self._leash.close()
        self._process.join(10)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(name: str, ports: Any, threads: int, leash: Connection) -> None:
    port: Any = RemotePort(ports)
    node = Node(name, lambda *_: port, threads=threads)
    leash.send(node.address)
    try:
        leash.recv()
    except EOFError:
        pass  # the parent closed the pipe
    node.close()
