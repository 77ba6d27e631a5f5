"""This process's connection to Ray. Every call of a training process and of a node worker to Ray goes through it.

Most functions of Ray connect a process that is not connected: to a cluster of another job, or to a new one. None does so within a
``RayConnection``, whose calls raise ``ClusterError`` once the connection has ended, and none waits without a deadline.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeout
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray._private import auto_init_hook, worker
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError

from ..storage.errors import ClusterError, RaystowError
from ..storage.runtime import background
from ..storage.runtime.clock import SYSTEM
from . import head_node

_Answer = TypeVar("_Answer")

_HEAD_GONE = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60")) / 2  # noqa: SIM112 (Ray's name)
"""Seconds after which a head node that is gone is given up: half of those after which Ray ends the processes of its nodes."""

_LOOK = 5.0  # seconds of waiting after which the head node is asked whether it is there
_RENEWALS = 3  # actors in a row that may end when they are called: each was unused until then
_NEW = "make another Checkpointer; without Ray, read with raystow.open and raystow.restore"

_within = threading.local()
_asking = threading.BoundedSemaphore(16)  # so that questions which a frozen head node does not answer do not pile up
_connect = auto_init_hook.auto_init_ray


def _auto_init_ray() -> None:
    """What Ray's functions call first. A check before them would be too early: another thread may disconnect meanwhile."""
    if not getattr(_within, "call", False):
        _connect()


auto_init_hook.auto_init_ray = _auto_init_ray

_forked = False


def _note_fork() -> None:
    global _forked
    _forked = ray.is_initialized()


os.register_at_fork(after_in_child=_note_fork)


@dataclass(frozen=True)
class RayConnection:
    """A connection of this process.

    Attributes:
        address: The host and port of the cluster's head node.
        session: Ray's name of the cluster, which no other one has.
        job: Ray's id of the job of this process.
        node: Ray's id of this node.
    """

    address: str
    session: str
    job: str
    node: str = field(compare=False)

    @classmethod
    def here(cls) -> RayConnection:
        """Return the connection that this process has now. Raises ``ClusterError`` if it has none."""
        if _forked:
            what = "this process was forked from one that uses Ray, which does not work in it"
            raise ClusterError(what, remedy="start it by spawn, or fork before Ray is used")
        found = _found()
        if found is None and ray.is_initialized():
            what = "this process is connected to Ray as a client (ray://)"
            raise ClusterError(what, remedy="run it on a node of the cluster: as a job, a task or an actor")
        if found is None:
            raise ClusterError("this process is not connected to Ray", remedy="call ray.init() first")
        return found

    def check(self) -> None:
        """Raise ``ClusterError`` if this process has not this connection any more."""
        now = _found()
        if now == self:
            return
        subject = f"Ray cluster at {self.address}"
        if now is None:
            what = "this process has disconnected: ray.shutdown() was called, or the process ends"
            raise ClusterError(what, subject=subject, remedy=f"call ray.init() and {_NEW}")
        to = "again" if now.session == self.session else f"to the cluster at {now.address}"
        what = f"ray.shutdown() was called, and this process has connected {to} since"
        raise ClusterError(what, subject=subject, remedy=_NEW)

    def call(self, send: Callable[[], object], timeout: float, who: str) -> Any:
        """Return the result of a remote call within ``timeout`` seconds.

        Args:
            send: Calls the actor, and returns Ray's reference. It must not look an actor up: see ``ask``.
            timeout: A frozen actor counts as alive for Ray: so there is always a limit.
            who: The actor, for errors.

        Raises:
            ClusterError: It has failed or does not answer, its head node is gone for half a minute, or this process has
                disconnected.
            RaystowError: The actor raised it.
        """
        with self._calling(who):
            return self._get(send(), timeout, who)

    def find(self, call: Callable[[], _Answer], forget: Callable[[], None] = lambda: None) -> _Answer:
        """Return the result of ``call``, which finds or starts an actor and calls it. Repeats it if the actor has ended for good:
        Ray does not restart one that was unused and has ended itself. ``forget``: called before."""
        for _ in range(_RENEWALS):
            try:
                return call()
            except ClusterError as error:
                if not isinstance(error.__cause__, ActorDiedError):
                    raise
            forget()
        return call()

    def send(self, send: Callable[[], object], who: str) -> Any:
        """As ``call``, but return Ray's reference instead of waiting."""
        with self._calling(who):
            return send()

    def ask(self, question: Callable[[], _Answer], timeout: float) -> _Answer:
        """Return the answer of a function of Ray that asks the head node, within ``timeout`` seconds.

        Raises:
            ClusterError: The head node does not answer, or this process has disconnected.
        """
        end = SYSTEM.monotonic() + timeout
        if not _asking.acquire(timeout=timeout):
            raise self._silent(timeout)
        answer = self.question(question)
        answer.add_done_callback(lambda _: _asking.release())
        return self.answer(answer, max(0.0, end - SYSTEM.monotonic()))

    def question(self, question: Callable[[], _Answer]) -> Future[_Answer]:
        """Start ``question`` on another thread: Ray waits for a frozen head node without end, and Python handles no signal
        meanwhile."""
        answer: Future[_Answer] = Future()
        background.start("raystow-ray", self._put_question, question, answer)
        return answer

    def answer(self, answer: Future[_Answer], timeout: float) -> _Answer:
        """Return the answer to a question. Raises ``ClusterError`` as ``ask``."""
        try:
            return answer.result(timeout)
        except FuturesTimeout:
            raise self._silent(timeout) from None

    def _silent(self, timeout: float) -> ClusterError:
        what = f"does not answer within {timeout:.0f} s"
        return ClusterError(what, subject=self._head, remedy="look at its gcs_server.out")

    @property
    def _head(self) -> str:
        return f"the head node at {self.address}"

    def _put_question(self, question: Callable[[], _Answer], answer: Future[_Answer]) -> None:
        try:
            with self._calling(self._head):
                answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    def _get(self, answer: object, timeout: float, who: str) -> object:
        seen = SYSTEM.monotonic()  # when the head node was there
        until = seen + timeout
        while True:
            left = max(0.0, until - SYSTEM.monotonic())
            try:
                return ray.get(answer, timeout=min(_LOOK, left))
            except GetTimeoutError as error:
                if left <= _LOOK:
                    what, remedy = f"did not answer within {timeout:.0f} s", "look at its log, or kill it"
                    raise ClusterError(what, subject=who, remedy=remedy) from error
            now = SYSTEM.monotonic()
            if head_node.listens(self.address):
                seen = now
            elif now >= seen + _HEAD_GONE:
                what = f"does not answer, and {self._head} is gone since {now - seen:.0f} s"
                raise ClusterError(what, subject=who, remedy="start the cluster and this process again")

    @contextlib.contextmanager
    def _calling(self, who: str) -> Iterator[None]:
        """The errors of Ray as raystow's own."""
        self.check()
        outer, _within.call = getattr(_within, "call", False), True
        try:
            yield
        except RayTaskError as error:  # first: Ray makes it a RaystowError, too, whose text is a traceback, if that is its cause
            if isinstance(error.cause, RaystowError):
                raise error.cause from None
            raise ClusterError(f"failed: {error.cause!r}", subject=who) from error
        except RaystowError:
            raise
        except RayActorError as error:
            raise ClusterError(f"died: {str(error).strip().splitlines()[-1]}", subject=who) from error
        except Exception as error:
            self.check()  # Ray fails in many ways while another thread disconnects
            raise ClusterError(f"{type(error).__name__}: {error}".splitlines()[0], subject=who) from error
        finally:
            _within.call = outer


def _found() -> RayConnection | None:
    """None if this process is not connected, also while it disconnects."""
    if not ray.is_initialized():
        return None
    here = worker.global_worker
    try:
        address, session = here.gcs_client.address, here.node.session_name
        return RayConnection(address, session, here.current_job_id.hex(), here.current_node_id.hex())
    except AttributeError:
        return None
