"""No error ends a long-lived thread: each loop is tested with errors, and each thread of the package is listed here."""

from __future__ import annotations

import ast
import errno
import logging
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.builders import memory_repository
from helpers.fake_clock import FakeClock
from helpers.fake_ray import FakeRay
from helpers.polling import wait_until
from helpers.system_calls import SystemCalls

from raystow.integrations.ray_train.train_sync import TrainSync
from raystow.orchestrator.client import settings_renewal
from raystow.storage.commit import leases
from raystow.storage.runtime import background
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.runtime.metrics import THREAD_ERRORS, Metric, record_with
from raystow.storage.stores.memory import MemoryStore
from raystow.storage.stores.settings import LOCAL
from raystow.workers import thread_priority
from raystow.workers.journal import entry_replicator
from raystow.workers.journal.entry_store import EntryStore
from raystow.workers.journal.node_journal import no_repository
from raystow.workers.journal.segment_writer import SegmentWriter
from raystow.workers.node import node as node_module
from raystow.workers.node.actor import NodeActor
from raystow.workers.node.node import Node
from raystow.workers.protocol.messages import EntryInfo, OpenJournal
from raystow.workers.protocol.tcp_channel import TcpChannel
from raystow.workers.protocol.unix_channel import Connection
from raystow.workers.replication import reconciler, replicator
from raystow.workers.usage import AFTERWARDS, Usage

PACKAGE = Path(background.__file__).parents[2]

LOOPS = {
    *("raystow-accept", "raystow-copies", "raystow-entries", "raystow-measure", "raystow-peer_server"),
    *("raystow-lease", "raystow-segments", "raystow-settings", "raystow-train", "raystow-unused"),
}
"""Threads that repeat a step during the whole life of their process or object."""

OF_ONE = {
    "raystow-session": "serves one process, whose connection ends with it",
    "raystow-peer": "serves one node, whose connection ends with it",
    "raystow-post": "sends for one connection, which it shuts down after an error",
    "raystow-stage": "stages for one process; an error fails the save",
    "raystow-look": "looks once for tensors that changed; the staging looks again",
    "raystow-listen": "receives for one process; an error ends the connection and its saves",
    "raystow-attempt": "drives one attempt; an error fails it",
    "raystow-alarm": "reports one attempt that is too late; the coordinator has a deadline, too",
    "raystow-stall": "sends one warning; the coordinator warns the rank, too",
    "raystow-late": "learns the outcome of one save that has not ended by its deadline; result() asks again",
    "raystow-ray": "asks the head node once; an error is raised where the answer is awaited",
    "raystow-waits": "prints once what a command waits for",
    "raystow-provenance": "asks git once; a version without an answer has no commit",
    "raystow-callbacks": "calls the callbacks of one rank; the error of each is logged",
    "raystow-report": "reports one failed save",
    "raystow-due": "asks the coordinator once; an error is raised where the answer is awaited",
    "raystow-outcome": "learns the outcome of one save; result() asks again",
    "raystow-journal": "records the steps of one process; an error ends the recording until the next save",
    "raystow-journal-answers": "receives for one process; an error ends the connection",
    "raystow-startup": "starts the actors of one rank; an error is raised by the first call that needs them",
    "raystow-requests": "runs an event loop, which logs errors; those of calls are raised where their results are awaited",
    "raystow-presence": "waits for the end of one connection; the next save connects again",
    "raystow-prepare": "prepares the first save of one process, which does it again after an error",
    "raystow-progress": "shows the bar of one restore",
    "raystow-demo": "replaces the node that the demo kills",
    "raystow-signals": "ends one command; the first signal interrupts its main thread in any case",
    "raystow-interrupted": "prints one line; the process ends after it in any case",
}
"""Threads that end with the object that they serve."""

TIMERS = {"raystow-alarm", "raystow-late", "raystow-stall"}
"""Threads of ``OF_ONE`` that start after a delay."""

IN_POOLS = {"raystow-code", "raystow-seal", "raystow-encode"}
"""Work on pools whose result is not awaited."""

AWAITED = {
    "cli/lineage.py": 1,
    "cli/run_history.py": 1,
    "orchestrator/coordinator/save_costs.py": 1,
    "orchestrator/journal/replay.py": 1,
    "orchestrator/journal/step_reader.py": 1,
    "orchestrator/restore/version_cache.py": 1,
    "orchestrator/standalone/writer.py": 2,
    "storage/copies/transfer.py": 1,
    "storage/versions/reader.py": 2,
    "storage/retention/plan.py": 1,
    "storage/retention/rewrite.py": 1,
    "storage/checks/scan.py": 1,
    "storage/versions/tensor_index.py": 1,
    "storage/versions/stored_manifest.py": 1,  # a result is taken, or its future cancelled, by ``bounded_map``
    "workers/cache/cache_server.py": 1,
    "workers/gpu/decode/lane_fetcher.py": 1,  # each error is raised where the result of the fetch is taken
    "workers/gpu/pinned_memory.py": 1,
    "workers/gpu/node_mode/node_encoder.py": 1,  # by background.submit
    "workers/gpu/uploads.py": 1,
    "workers/journal/entry_bytes.py": 1,
    "workers/journal/node_journal.py": 1,
    "workers/node/node.py": 2,  # by background.submit
    "workers/packing/attempt.py": 1,  # the packer awaits each upload
}
"""Number of pools by file. The results of their calls are awaited, so an error is raised there."""

TASKS = {
    "orchestrator/coordinator/actor.py": 7,
    "orchestrator/coordinator/node_census.py": 1,
    "storage/stores/endless_answers.py": 1,
}
"""Tasks of event loops: tasks of the actor record all errors in an ``ErrorLog``; the results of the others are awaited."""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls in a module, each with the called expression."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_every_thread_of_the_package_is_known() -> None:
    """A new thread must be added to the lists above, and a new loop also to the test below."""
    named: dict[str, set[str]] = {"repeat": set(), "start": set(), "after": set(), "submit": set()}
    pools: dict[str, int] = {}
    tasks: dict[str, int] = {}
    raw: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = str(path.relative_to(PACKAGE))
        for function, call in calls(path):
            owner, _, name = function.rpartition(".")
            if owner == "background" and name in named:
                (text,) = [
                    ast.unparse(arg) for arg in call.args if "raystow-" in ast.unparse(arg) or ast.unparse(arg) == "_THREAD"
                ]
                named[name].add(ast.literal_eval(text) if text != "_THREAD" else "raystow-encode")
            elif name in ("create_task", "ensure_future", "run_coroutine_threadsafe"):
                tasks[where] = tasks.get(where, 0) + 1
            elif name == "ThreadPoolExecutor":
                pools[where] = pools.get(where, 0) + 1
            elif name in ("Thread", "Timer", "start_new_thread", "ProcessPoolExecutor") and path.name != "background.py":
                raw.append(f"{where}: {function}")
    assert raw == []
    assert named == {
        "repeat": LOOPS,
        "start": {*OF_ONE} - {"raystow-alarm", "raystow-late", "raystow-stall"},
        "after": TIMERS,
        "submit": IN_POOLS,
    }
    assert pools == AWAITED
    assert tasks == TASKS


class Counted:
    """Counts the errors of threads by the name of the thread."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._older = {thread for thread in threading.enumerate() if thread is not threading.current_thread()}

    def record(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        if metric is THREAD_ERRORS and threading.current_thread() not in self._older:
            self.errors.append(tags["thread"])

    def logged(self, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
        """Return the log records of the threads of this test. Threads of other tests may still run."""
        others = {thread.ident for thread in self._older if thread.is_alive()}
        return [record for record in caplog.records if record.thread not in others]


@pytest.fixture
def counted() -> Iterator[Counted]:
    recorder = Counted()
    record_with(recorder.record)
    yield recorder
    record_with(None)


@pytest.fixture
def node(counted: Counted) -> Iterator[Node]:
    """Yield a node whose threads start after ``counted``, so their errors are counted."""
    made = Node("n", lambda *_: None, threads=1)  # type: ignore[arg-type,return-value]
    yield made
    made.close()


INTERVALS = (
    (node_module, "_MEASURE"),
    (reconciler, "LOOK"),
)
"""The intervals of the loops."""


class Failing:
    """Raises an error in the first three calls, and then calls the original function."""

    def __init__(self, original: Callable[..., Any], error: Exception) -> None:
        self._original, self._error, self.calls = original, error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls <= 3:
            raise self._error
        return self._original(*args, **kwargs)


@pytest.mark.parametrize("thread", sorted(LOOPS))
def test_a_loop_survives_errors(
    thread: str, counted: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop continues and logs the error once; a metric counts all errors."""
    for module, interval in INTERVALS:
        monkeypatch.setattr(module, interval, 0.01)
    owner, name = {
        "raystow-accept": (background, "start"),
        "raystow-copies": (replicator.Replicator, "step"),
        "raystow-entries": (entry_replicator.EntryReplicator, "step"),
        "raystow-measure": (node_module, "measure"),
        "raystow-peer_server": (background, "start"),
        "raystow-lease": (leases.Lease, "_try_to_renew"),
        "raystow-segments": (SegmentWriter, "step"),
        "raystow-settings": (settings_renewal.SettingsRenewal, "_renew"),
        "raystow-train": (TrainSync, "collect"),
        "raystow-unused": (Node, "end_if_unused"),
    }[thread]
    failing = Failing(getattr(owner, name), RuntimeError("can't start new thread"))
    stop: Callable[[], object]

    def begin_to_fail() -> None:
        monkeypatch.setattr(owner, name, lambda *args: failing(*args))

    with caplog.at_level(logging.ERROR):
        if thread == "raystow-lease":
            lease = leases.Lease(MemoryStore("leased"), 1, "a" * 16, SYSTEM, renew_after=0.01).__enter__()
            stop = lambda: lease.__exit__(None, None, None)  # noqa: E731
            begin_to_fail()
        elif thread == "raystow-settings":
            begin_to_fail()
            stop = settings_renewal.SettingsRenewal(lambda anew: LOCAL, LOCAL, lambda settings: None, pauses=(0.01, 0.01)).close
        elif thread == "raystow-train":
            begin_to_fail()
            sync = TrainSync(memory_repository(), "run", listed=lambda seconds: (), write_pointer=lambda entry: None)
            stop = sync.close
            wait_until(lambda: sync.wake() or failing.calls > 4, "calls after the errors")
        elif thread == "raystow-segments":
            begin_to_fail()
            opening = OpenJournal("", "", 0, 0, durable_every=1)
            writer = SegmentWriter(EntryStore(0), opening, lambda: no_repository(opening.store))
            background.repeat(thread, writer.run)
            stop = writer.close
            entry = EntryInfo("", 0, 1, 1, 0, ())
            wait_until(lambda: writer.kept(entry) or failing.calls > 3, "calls after the errors")
        elif thread == "raystow-unused":
            begin_to_fail()
            clock = FakeClock()
            ended = FakeRay().replace(monkeypatch, "get_runtime_context", "kill").killed
            worker, usage = NodeActor.__new__(NodeActor), Usage(clock)
            clock.time += AFTERWARDS
            worker.node = Node("n", lambda uri: None, threads=1, usage=usage)  # type: ignore[arg-type,return-value]
            background.repeat(thread, worker.end_if_unused)
            stop = lambda: ended.wait(30) or pytest.fail("not ended")  # noqa: E731
        else:
            node = Node("n", lambda *_: None, threads=1)  # type: ignore[arg-type,return-value]
            stop = node.close
            begin_to_fail()
            if thread == "raystow-accept":
                for _ in range(3):
                    with pytest.raises(Exception, match=r"closed|does not answer"):
                        Connection.connect(node.address)
                Connection.connect(node.address).close()
            elif thread == "raystow-peer_server":
                for _ in range(3):
                    with pytest.raises(OSError, match=r"clos|reset|pipe"):
                        TcpChannel.connect(node.contact)
                TcpChannel.connect(node.contact).close()
        wait_until(lambda: failing.calls > 3, "a call after the errors")
        stop()
    assert counted.errors == [thread] * 3
    logged = [record.message for record in counted.logged(caplog) if record.message.startswith("an error in the thread")]
    assert len(logged) == 1
    assert thread in logged[0]


@pytest.mark.slow  # threads of other tests in the process cannot poll with this limit
def test_accepting_survives_too_many_open_files(node: Node, counted: Counted) -> None:
    """The test sets a real limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = socket.socket(socket.AF_UNIX)
    other_node = socket.socket(socket.AF_INET)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        process.connect("\0" + node.address)
        other_node.connect((node.contact.host, node.contact.port))
        wait_until(lambda: {*counted.errors} >= {"raystow-accept", "raystow-peer_server"}, "both are refused")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        process.close()
        other_node.close()
    Connection.connect(node.address).close()
    TcpChannel.connect(node.contact).close()


@pytest.mark.parametrize("code", [errno.ECONNABORTED, errno.ENOBUFS, errno.EINTR, errno.EPERM])
def test_accepting_survives_errors_of_the_network(
    code: int, node: Node, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three calls of ``accept`` fail in each of the two sockets of the node."""
    failures = {"\0" + node.address: 3, (node.contact.host, node.contact.port): 3}
    accept = socket.socket.accept

    def failing(listening: socket.socket) -> Any:
        name = listening.getsockname()
        name = name.decode() if isinstance(name, bytes) else name
        if failures.get(name, 0):
            failures[name] -= 1
            raise OSError(code, "injected")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", failing)
    Connection.connect(node.address).close()  # end the calls that wait in the real function
    TcpChannel.connect(node.contact).close()
    wait_until(lambda: counted.errors.count("raystow-accept") == counted.errors.count("raystow-peer_server") == 3, "the errors")
    Connection.connect(node.address).close()
    TcpChannel.connect(node.contact).close()


def test_an_error_of_a_thread_is_logged_and_counted(counted: Counted, caplog: pytest.LogCaptureFixture) -> None:
    def fail(text: str) -> None:
        raise KeyError(text)

    with caplog.at_level(logging.ERROR), ThreadPoolExecutor(1) as pool:
        background.start("raystow-one", fail, "a").join()
        background.after(0, "raystow-two", lambda: fail("b")).join()
        background.submit(pool, "raystow-three", fail, "c")
    assert counted.errors == ["raystow-one", "raystow-two", "raystow-three"]
    assert [record.exc_info is not None for record in counted.logged(caplog)] == [True] * 3


def test_the_number_of_logged_errors_is_bounded(counted: Counted, caplog: pytest.LogCaptureFixture) -> None:
    errors = background.ErrorLog("raystow-one")
    for number in range(1000):
        errors.note(KeyError(number))
    assert (len(counted.logged(caplog)), len(counted.errors)) == (background.REMEMBERED, 1000)


def test_a_pool_works_without_permission_to_lower_priority(system_calls: SystemCalls) -> None:
    """An error in the initializer would break the pool permanently."""

    def refused(*_: int) -> None:
        raise PermissionError(errno.EPERM, "seccomp")

    system_calls.replace(setpriority=refused)
    with ThreadPoolExecutor(1, initializer=thread_priority.give_way) as pool:
        assert pool.submit(threading.get_ident).result(10)
