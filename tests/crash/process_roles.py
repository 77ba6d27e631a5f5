"""The processes of a trial: the production classes, each in a separate process as under Ray, but without Ray."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import ray
from helpers.no_ray import without_ray
from helpers.node_process import PortServer

from crash import crash_points, trial_journal
from crash.remote_calls import Blocking, CoordinatorPort, NodePeers
from crash.trial_state import PART_RANK, blank, same_bits, state_at
from crash.tripwire import Control, Message, Tripwire
from raystow.cli import app
from raystow.orchestrator import ray_cluster
from raystow.orchestrator.client import checkpointer, startup
from raystow.orchestrator.client.options import Compression
from raystow.orchestrator.client.part import Part
from raystow.orchestrator.client.pending import Pending
from raystow.orchestrator.coordinator import actor as coordinator_actor
from raystow.orchestrator.coordinator import opened, upkeep
from raystow.orchestrator.coordinator.housekeeping import Housekeeping
from raystow.orchestrator.coordinator.segments import OpenedSegment, Segments
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import RaystowError, SaveFailed
from raystow.storage.retention.policy import Policy
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store
from raystow.workers.node import actor as node_actor
from raystow.workers.node.node import Node
from raystow.workers.protocol.messages import START, OpenJournal
from raystow.workers.ray_connection import RayConnection
from raystow.workers.replication.peers import Peers
from raystow.workers.shm.ring import SLOT


def play(request: Message, end: socket.socket) -> None:
    """Run the requested process to its end."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(threadName)s %(levelname)s %(name)s: %(message)s")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(request["environment"])
    control = Control(end)
    trip = Tripwire(control, target=request["target"], record=request["record"])
    crash_points.watch_stores(trip)
    crash_points.watch_wire(trip)
    place = urlsplit(request["uri"])
    if place.scheme == "file":
        crash_points.watch_folder(place.path, trip)
    ray.init = _no_ray
    ray.nodes = lambda: [{"NodeID": node, "Alive": True, "Labels": {}} for node in request["nodes"]]
    ray.put = lambda records: records
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: request["node"], get_job_id=lambda: "1")
    RayConnection.here = without_ray(request["node"])
    threading.excepthook = lambda failure: control.send(error="".join(traceback.format_exception(failure.exc_value)))
    try:
        _ROLES[request["role"]](request, control, trip)
    except BaseException:
        control.send(error=traceback.format_exc())


def _no_ray(*_: object, **__: object) -> None:
    raise AssertionError("a trial has no Ray, and must not connect to one on this machine")


def _coordinator(request: Message, control: Control, trip: Tripwire) -> None:
    crash_points.watch_core(trip)
    nodes = NodePeers(request["port"])
    node_actor._held = nodes.held

    class Told(Housekeeping):
        """Deletes dropped versions immediately, and reports the end of each run."""

        def __init__(self, committer: Committer) -> None:
            super().__init__(committer, grace=0.0)

        def run(self, policy: Policy, bases: Collection[int] = ()) -> None:
            try:
                super().run(policy, bases)
                control.send(housed=True)
            except BaseException:
                control.send(error=traceback.format_exc())

    class ToldSegments(Segments):
        """Reports each settled segment."""

        def settled(self, opened: OpenedSegment) -> None:
            super().settled(opened)
            control.send(settled=[opened.newest.step, opened.newest.generation.token])

    upkeep.Housekeeping, opened.Segments = Told, ToldSegments

    async def serve() -> None:
        actor, loop = coordinator_actor.CoordinatorActor(request["uri"]), asyncio.get_running_loop()
        control.send(ready={"repository": (await actor.start()).repository})
        PortServer(Blocking(actor, loop), request["port"])
        await asyncio.Event().wait()

    asyncio.run(serve())


def _node(request: Message, control: Control, trip: Tripwire) -> None:
    nodes = NodePeers(request["port"])
    others = Peers(nodes.contact, SYSTEM)  # without a list of nodes: none keeps copies
    node = Node(request["name"], lambda *_: CoordinatorPort(request["port"], trip), peers=others, threads=1)
    entries = node.journal.store.holdings
    calls = {"holdings": node.holdings, "journal_entries": entries, "contact": lambda: node.contact}
    port = SimpleNamespace(**calls, saves_to=lambda uri: [uri])  # keeps the coordinator alive
    PortServer(port, nodes.at(request["name"]))
    control.send(ready={"address": node.address})
    signal.pause()


def _connect(request: Message, control: Control, trip: Tripwire) -> CoordinatorPort:
    """Let a process of the training find the others of the trial."""
    port = CoordinatorPort(request["port"], trip)
    ray_cluster.connect = RayConnection.here
    startup.RayCoordinatorClient = lambda *_: port
    startup.node_actor = _actor("address", lambda *_: control.ask(where=request["node"])["address"])
    checkpointer.Checkpointer.prepare = lambda self, state: None  # it would ask for the address on another thread
    return port


def _trainer(request: Message, control: Control, trip: Tripwire) -> None:
    rank, port = request["rank"], _connect(request, control, trip)
    ckpt = checkpointer.Checkpointer(
        request["uri"],
        rank=rank,
        world_size=request["world_size"],
        memory=8 * SLOT,
        retention=Policy(keep_last=request["keep"]) if request["keep"] else None,
        compression=Compression(delta=2),
        parts=request["parts"],
    )
    state = blank(rank=rank)
    version = ckpt.restore_latest(state)
    found: Message = {"version": 0, "whole": True}
    if version is not None:
        expected = state_at(version.step, version.metrics["salt"], rank=rank)
        found = {"version": version.id, "whole": same_bits(state, expected)}
    if request["journal"]:
        begun = ckpt._startup  # a journal without an optimizer needs what ``Checkpointer.journal`` uses
        opening = OpenJournal(request["uri"], begun.wait().repository, rank, replicas=0, durable_every=trial_journal.EVERY)
        base = START if version is None else version.step
        journal = trial_journal.TrialJournal(opening, begun.node_address(), port, begun.member, base)
        found = {**found, "whole": found["whole"] and journal.whole, "step": journal.step, "generation": journal.generation}
    control.send(ready=found)
    while True:
        order = control.receive()
        if "record" in order:
            control.send(recorded=journal.record(order["record"]))
            continue
        step, salt = order["step"], order["salt"]
        pending = ckpt.save(state_at(step, salt, rank=rank), step=step, metrics={"salt": salt}, cut={"salt": salt})
        _report(control, pending)


def _buffer(request: Message, control: Control, trip: Tripwire) -> None:
    """A part, which waits for each save of the ranks."""
    _connect(request, control, trip)
    part = Part(request["uri"], "buffer", memory=8 * SLOT, compression=Compression(delta=2))
    state = blank(rank=PART_RANK)
    version = part.restore(state)
    whole = version is None or same_bits(state, state_at(version.step, version.metrics["salt"], rank=PART_RANK))
    control.send(ready={"version": 0 if version is None else version.id, "whole": whole})

    step = 0
    while True:
        begun = part.wait_for(step)
        step = begun.step + 1
        state = state_at(begun.step, begun.cut["salt"], rank=PART_RANK)
        _report(control, part.save(state, step=begun.step))


def _report(control: Control, pending: Pending) -> None:
    """Send the outcome of a save to the harness."""
    try:
        control.send(outcome={"step": pending.step, "version": pending.result().id})
    except RaystowError as error:
        control.send(outcome={"step": pending.step, "error": str(error), "failed": isinstance(error, SaveFailed)})


def _actor(name: str, method: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that makes a handle to an actor with one method."""
    return lambda *_: SimpleNamespace(**{name: SimpleNamespace(remote=method)})


def _operator(request: Message, control: Control, trip: Tripwire) -> None:
    sys.argv = ["raystow", *request["command"]]
    try:
        app.main()
    except SystemExit as exit:
        control.send(exit=exit.code or 0)


def _writer(request: Message, control: Control, trip: Tripwire) -> None:
    store, size = open_store(request["uri"]), request["size"]
    while True:
        store.put(request["key"], [os.urandom(size)])
        control.send(written=size)
        store.delete([request["key"]])


_ROLES = {
    "coordinator": _coordinator,
    "node": _node,
    "trainer": _trainer,
    "buffer": _buffer,
    "operator": _operator,
    "writer": _writer,
}
