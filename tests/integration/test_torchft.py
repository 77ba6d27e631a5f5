"""torchft with ``raystow.torchft.CheckpointTransport``: replicas on nodes of a Ray cluster recover from each other."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from state_equality import same
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import raystow
from raystow.workers.node.actor import NAMESPACE, NODE
from raystow.workers.states.state_reader import StateReader

pytest.importorskip("torchft", reason="make test-frameworks installs torchft in an environment of its own")

from test_examples import _run
from torchft.checkpointing.transport_test import run_multi_recovery_test

from raystow.orchestrator.integrations.torchft import transport as healing
from raystow.torchft import CheckpointTransport

anywhere = pytest.mark.parametrize("transport", ["here", "away"], indirect=True)
Transports = Callable[..., CheckpointTransport]
SECONDS = timedelta(seconds=60)
CHUNK = 4 << 20


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


@pytest.fixture
def transport(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Transports]:
    """Return a function that makes transports. With the parameter "away", they behave as if on different nodes."""
    made, away = list[CheckpointTransport](), getattr(request, "param", "here") == "away"

    def make(*args: Any) -> CheckpointTransport:
        one = CheckpointTransport(*args)
        metadata = one.metadata()
        if away:
            one.metadata, one._node = lambda: metadata, ""
        made.append(one)
        return one

    yield make
    for one in made:
        one.shutdown()


class Replica:
    """A replica in a separate process."""

    def __init__(self) -> None:
        self.transport = CheckpointTransport()

    def metadata(self) -> str:
        return self.transport.metadata()

    def send(self, step: int, state: dict[str, Any], *, dies_after: int = -1) -> None:
        """Stage a state; ``dies_after``: the number of chunks after which this process is killed."""
        if dies_after >= 0:
            _die_within_the_copy(dies_after)
        self.transport.send_checkpoint([1], step, state, SECONDS)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _die_within_the_copy(chunks: int) -> None:
    write, left = healing._write_all, [chunks]

    def write_and_die(*part: Any) -> None:
        write(*part)
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    healing._write_all = write_and_die


def replica(node: str) -> Any:
    return ray.remote(Replica).options(num_cpus=0, resources={node: 1}).remote()


def weights(seed: int) -> dict[str, Any]:
    """Return a state of five chunks."""
    return {"user": {"default": {"w": torch.randn(5 << 20, generator=torch.Generator().manual_seed(seed))}}}


@anywhere
def test_the_transport_test_of_torchft_passes(transport: Transports) -> None:
    run_multi_recovery_test(TestCase(), lambda rank, world_size: transport(), torch.device("cpu"))


@anywhere
def test_every_kind_of_value_is_received_bit_for_bit(transport: Transports, one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model = torch.nn.Linear(33, 17)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(2, 33)).sum().backward()
    optimizer.step()
    state = {
        "model": dict(model.state_dict()),
        "optim": optimizer.state_dict(),
        "tensors": [torch.randn(3, 5).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool)],
        "views": (torch.randn(8, 6).t()[1:], torch.randn(1).expand(7), torch.tensor(5), torch.empty(0, 3)),
        "arrays": {"a": np.arange(7, dtype=np.int16), "b": np.float64(0.1), "c": np.zeros((0, 2))},
        "sharded": distribute_tensor(torch.randn(6, 4), mesh, [Shard(1)]),
        "values": [None, True, -3, float("nan"), 1 + 2j, "text", b"bytes", (), {}, [[]]],
        "large": torch.randint(0, 255, (3 * CHUNK + 5,), dtype=torch.uint8),
    }
    sender, receiver = transport(), transport(lambda: state)
    sender.send_checkpoint([1], 3, state, SECONDS)
    got = transport().recv_checkpoint(0, sender.metadata(), 3, SECONDS)
    assert same(state, got)
    again = receiver.recv_checkpoint(0, sender.metadata(), 3, SECONDS)
    assert same(state, again)
    assert receiver.received == 0
    assert again["sharded"].device_mesh is mesh
    got["large"] += 1  # the received tensor does not share memory with the sender
    assert not torch.equal(got["large"], state["large"])
    assert same(transport().recv_checkpoint(0, sender.metadata(), 3, SECONDS), state)


def test_only_chunks_that_differ_are_received(transport: Transports) -> None:
    """The receiver's state has no keys of torchft's Manager around it, lacks a tensor, and has a surplus one."""
    own = {"a": torch.arange(3 << 20), "b": torch.ones(1 << 20), "gone": torch.ones(3)}
    new = {"a": own["a"].clone(), "b": own["b"], "c": torch.zeros(2 << 20)}
    new["a"][5] += 1
    sender, receiver = replica("node_a"), transport(lambda: own)
    ray.get(sender.send.remote(1, {"user": {"default": new}, "torchft": {"step": 1}}))
    got = receiver.recv_checkpoint(0, ray.get(sender.metadata.remote()), 1, SECONDS)
    assert same(got, {"user": {"default": new}, "torchft": {"step": 1}})
    assert receiver.received == CHUNK + new["c"].nbytes  # the first chunk of "a", and all of "c"


def test_unsupported_values_are_refused_with_their_path(transport: Transports, one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    sender = transport()
    with pytest.raises(raystow.StateError, match=r'state\["user"\]\["schedule"\]: .*function'):
        sender.send_checkpoint([1], 1, {"user": {"schedule": lambda step: step}}, SECONDS)
    with pytest.raises(raystow.StateError, match=r'state\["sum"\]: DTensors placed as P.* cannot be sent'):
        sender.send_checkpoint([1], 1, {"sum": partial}, SECONDS)
    with pytest.raises(raystow.DeadlineExceeded, match="timed out"):
        sender.send_checkpoint([1], 1, weights(1), timedelta(0))


def test_a_state_larger_than_the_memory_is_refused(transport: Transports, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node worker refuses the state before it fills its memory."""
    sender = transport()
    monkeypatch.setattr("raystow.orchestrator.integrations.torchft.staged_state.content", lambda local: None)
    with pytest.raises(raystow.ClusterError, match=r"state of step 1: cannot be staged: \d+ bytes do not fit into \d+"):
        sender.send_checkpoint([1], 1, {"w": torch.empty(1).expand(1 << 36)}, SECONDS)


def test_the_state_of_a_dead_sender_is_received(transport: Transports) -> None:
    """The sender's node worker has the state. If the sender dies before staging ends, the receiver gets an error immediately."""
    dying, killed = replica("node_a"), replica("node_b")
    first, second = ray.get([dying.metadata.remote(), killed.metadata.remote()])
    ray.get(dying.send.remote(7, weights(1)))
    dying.die.remote()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(dying.metadata.remote())
    receiver = transport()
    assert same(receiver.recv_checkpoint(0, first, 7, SECONDS), weights(1))
    killed.send.remote(7, weights(1), dies_after=2)
    with pytest.raises(raystow.ClusterError, match="sender of the state: has died"):
        receiver.recv_checkpoint(0, second, 7, SECONDS)
    with pytest.raises(raystow.ClusterError, match="sender of the state: has died"):
        receiver.recv_checkpoint(0, second, 8, SECONDS)


def test_a_replica_recovers_from_another_sender(transport: Transports, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node worker dies during a read, and the sender connects to the new one when its metadata is requested again."""
    first, second = replica("node_a"), replica("node_b")
    places = ray.get([first.metadata.remote(), second.metadata.remote()])
    ray.get([first.send.remote(7, weights(1)), second.send.remote(7, weights(1))])
    read, calls = StateReader.read, [0]

    def read_and_kill(reader: StateReader, start: int, target: memoryview) -> None:
        calls[0] += 1
        if calls[0] == 4:
            ray.kill(ray.get_actor(NODE + places[0].partition("/")[0], NAMESPACE), no_restart=False)
            while reader._open:
                read(reader, start, target)  # until the read fails
        read(reader, start, target)

    receiver = transport()
    monkeypatch.setattr(StateReader, "read", read_and_kill)
    with pytest.raises(raystow.ClusterError, match="sender of the state"):
        receiver.recv_checkpoint(0, places[0], 7, SECONDS)
    monkeypatch.undo()
    assert same(receiver.recv_checkpoint(0, places[1], 7, SECONDS), weights(1))
    assert ray.get(first.metadata.remote()) == places[0]
    ray.get(first.send.remote(8, weights(2)))
    assert same(receiver.recv_checkpoint(0, places[0], 8, SECONDS), weights(2))


@anywhere
@pytest.mark.parametrize("start", [7, 8, 40, 4096, 2 * CHUNK, 4096 + 5 * CHUNK])
def test_changed_bytes_are_not_returned(transport: Transports, monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    """In the size of the header, in its digest, in the header, in two chunks, and in the digests."""
    write = healing._write_all

    def change_and_write(descriptor: int, part: memoryview, at: int) -> None:
        changed = bytearray(part)
        if at <= start < at + part.nbytes:
            changed[start - at] ^= 1
        write(descriptor, memoryview(changed), at)

    sender, receiver = transport(), transport()
    monkeypatch.setattr(healing, "_write_all", change_and_write)
    sender.send_checkpoint([1], 1, weights(1), SECONDS)
    with pytest.raises(raystow.Damaged):
        receiver.recv_checkpoint(0, sender.metadata(), 1, SECONDS)


@anywhere
def test_a_receiver_waits_only_for_its_step(transport: Transports) -> None:
    sender, receiver = transport(), transport()
    sender.send_checkpoint([1], 5, {"a": 1}, SECONDS)
    with pytest.raises(raystow.ClusterError, match="has no state of step 4 any more"):
        receiver.recv_checkpoint(0, sender.metadata(), 4, SECONDS)
    with pytest.raises(raystow.DeadlineExceeded, match=r"timed out: the state of step 6 did not come within 0\.2 s"):
        receiver.recv_checkpoint(0, sender.metadata(), 6, timedelta(seconds=0.2))
    sender.disallow_checkpoint()
    with pytest.raises(raystow.DeadlineExceeded):
        receiver.recv_checkpoint(0, sender.metadata(), 5, timedelta(seconds=0.2))


def test_a_changed_interface_names_the_tried_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torchft.checkpointing.transport.CheckpointTransport.disallow_checkpoint")
    for name in [name for name in sys.modules if re.match(r"raystow\.(orchestrator\.integrations\.)?torchft", name)]:
        monkeypatch.delitem(sys.modules, name)
    changed = r"torchft .* has changed: .*disallow_checkpoint.*tried with torchft 0\.2"
    with pytest.raises(raystow.Unsupported, match=changed):
        importlib.import_module("raystow.torchft")


def test_a_killed_replica_recovers_under_ray_train(tmp_path: Path) -> None:
    """The example uses torchft's lighthouse and Manager under Ray Train's ``TorchftConfig``."""
    printed = _run("ray_train_torchft.py", tmp_path / "run", 30, 10, cwd=tmp_path)
    first, second = (line for line in printed.splitlines() if line.startswith("replica "))
    assert (tmp_path / "run" / "killed").exists()
    healed = re.search(r"replica 1: got the state of step \[(\d+)\]; ended at step 30, sum ", second)
    assert healed
    assert int(healed[1]) >= 10
    assert first.partition("ended at ")[2] == second.partition("ended at ")[2]
