"""Calls to Ray without a cluster: none connects to one, none waits for a head node that is gone, and signals are handled."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from helpers.fake_clock import FakeClock
from helpers.fake_ray import FakeRay
from helpers.no_ray import NoRay, Unchecked
from ray.exceptions import GetTimeoutError, RayTaskError

from raystow.orchestrator import ray_cluster
from raystow.storage.errors import ClusterError
from raystow.workers import head_node, ray_connection

LONG = 600.0


class Interrupted(Exception):
    """A signal was handled."""


@contextlib.contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """Yield the address of a server that answers every connection so, or never."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(1)
                        connection.sendall(answer or b"")

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The connections of this process to Ray are counted instead of made."""
    return FakeRay().replace(monkeypatch, "init", "is_initialized").joined


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", r"does not answer at 127\.0\.0\.1:1"),
        ("ray://127.0.0.1:10001", "'ray://127.0.0.1:10001' is not the address of a head node"),
        ("http://127.0.0.1:8265", "'http://127.0.0.1:8265' is not the address"),
        ("local", "'local' is not the address"),
    ],
)
def test_no_cluster_is_joined_or_started_at_a_wrong_address(
    no_cluster: list[str], monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match=said):
        ray_cluster.connect()
    assert no_cluster == []


@pytest.mark.parametrize(("answer", "said"), [(None, "does not answer at"), (b"HTTP/1.1 400 Bad\r\n\r\n", "something else than")])
def test_a_port_without_a_head_node_is_an_error(
    no_cluster: list[str], monkeypatch: pytest.MonkeyPatch, answer: bytes | None, said: str
) -> None:
    """A frozen head node accepts connections; Ray would wait for it for minutes."""
    monkeypatch.setattr(head_node, "ANSWER_TIMEOUT", 0.2 if answer is None else LONG)
    with listener(answer) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ClusterError, match=said):
            ray_cluster.connect()
    assert no_cluster == []


def test_a_thread_connects_to_nothing_after_a_shutdown(no_cluster: list[str]) -> None:
    """The connection ends after it was checked: Ray's functions would start or join a cluster."""
    connection = NoRay("127.0.0.1:1", "gone", "1", "node")
    for call in (
        lambda: ray.get_actor("any"),
        lambda: ray.get_runtime_context().get_node_id(),
        lambda: ray.get(ray.ObjectRef.nil()),
    ):
        with pytest.raises(ClusterError):
            connection.ask(call, LONG)
        with pytest.raises(ClusterError):
            connection.send(call, "an actor")
    assert no_cluster == []


def test_the_user_s_own_calls_connect_as_ever(no_cluster: list[str]) -> None:
    with contextlib.suppress(Exception):
        ray.get_runtime_context()
    assert no_cluster == [""]


def test_a_call_ends_when_the_head_node_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vote waits for other ranks, for 12 minutes by default."""
    clock, waited = FakeClock(), list[float]()

    def get(_: Any, *, timeout: float) -> None:
        clock.sleep(timeout)
        waited.append(timeout)
        raise GetTimeoutError

    monkeypatch.setattr(ray_connection, "SYSTEM", clock)
    monkeypatch.setattr(head_node, "listens", lambda address: clock.time < 100)
    FakeRay().replace(monkeypatch, "get").get = get  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match="coordinator: does not answer, and the head node at head:1 is gone since 30 s"):
        Unchecked("head:1", "s", "1", "n").call(lambda: "reference", 720, "coordinator")
    assert 125 <= clock.time <= 135
    assert max(waited) <= 5


def test_the_error_of_an_actor_is_raystow_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises an error of two classes, whose text is the actor's traceback."""
    own = ClusterError("rank 1 could not restore", remedy="restore again")

    def get(_: Any, *, timeout: float) -> None:
        raise RayTaskError("handle", "Traceback of the actor", own).as_instanceof_cause()

    FakeRay().replace(monkeypatch, "get").get = get  # type: ignore[method-assign]
    with pytest.raises(ClusterError) as caught:
        Unchecked("head:1", "s", "1", "n").call(lambda: "reference", LONG, "coordinator")
    assert caught.value is own


def test_a_signal_is_handled_while_the_head_node_is_frozen() -> None:
    asked, end, handled = threading.Event(), threading.Event(), threading.Event()

    def frozen() -> None:
        asked.set()
        end.wait(LONG)

    def interrupt() -> None:
        asked.wait(LONG)
        while not handled.wait(0.1):  # Python ignores what a handler raises while a destructor runs
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def handle(*_: object) -> None:
        if not handled.is_set():
            raise Interrupted

    before, sender = signal.signal(signal.SIGTERM, handle), threading.Thread(target=interrupt)
    try:
        sender.start()
        with pytest.raises(Interrupted):
            NoRay("head:1", "s", "1", "n").ask(frozen, LONG)
    finally:
        handled.set()
        sender.join(LONG)
        signal.signal(signal.SIGTERM, before)
        end.set()


def test_questions_to_a_frozen_head_node_do_not_pile_up() -> None:
    end, asked = threading.Event(), list[int]()

    def frozen() -> None:
        asked.append(1)
        end.wait(LONG)

    connection = NoRay("head:1", "s", "1", "n")
    try:
        for _ in range(20):
            with pytest.raises(ClusterError, match="the head node at head:1: does not answer"):
                connection.ask(frozen, 0.01)
        assert len(asked) <= 16
    finally:
        end.set()
    assert connection.ask(lambda: "awake", LONG) == "awake"
