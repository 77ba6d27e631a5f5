"""Invalid arguments of a Checkpointer raise an error that names them, before any part of a cluster is started."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from helpers.no_ray import refuse_cluster
from helpers.saves import NoNode, checkpointer

import raystow
from raystow import dcp
from raystow.orchestrator.argument_checks import metrics_of
from raystow.storage.errors import StateError
from raystow.workers.cache.host_memory import memory_limit

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``connect`` fail, which a Checkpointer calls after the checks of its arguments."""
    refuse_cluster(monkeypatch, ConnectionRefusedError("all arguments are valid"))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rank", ["0", 0.0, True, -1]),
        ("world_size", ["1", 1.0, True, 0]),
        ("memory", ["1GB", None, 1.5 * GIB, True, (32 << 20) - 1, 1 << 50]),
        ("timeout", ["5", None, True, 0, -1, float("nan"), float("inf"), 1e10]),
        ("max_in_flight", ["2", None, 1.5, True, 0]),
        ("on_failure", ["ignore", "10", None, 1.5, True, 0]),
        ("retention", [{"keep_last": 1}, 3]),
        ("compression", ["gzip", None, {"codec": "auto"}]),
        ("replication", [-1, None, "1"]),
        ("interval", ["auto", 0, None]),
        ("callbacks", [[None], ["wandb"]]),
    ],
)
def test_an_invalid_argument_is_named_with_its_value(name: str, values: list[object]) -> None:
    for value in values:
        options: dict[str, Any] = {"rank": 0, "world_size": 1, name: value}
        with pytest.raises(StateError) as refused:
            raystow.Checkpointer("memory://arguments", **options)
        assert name in str(refused.value).lower()
        assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("group", "name", "values"),
    [
        (raystow.Memory, "staging", ["1GB", 1.5 * GIB, True, (32 << 20) - 1, 1 << 50]),
        (raystow.Memory, "cache", ["1GB", 0.5, True, -1, 1 << 63]),
        (raystow.Memory, "cache_seconds", ["1h", 0, -1.0, True, None, float("nan"), 2e9]),
        (raystow.Compression, "codec", ["gzip", None, ["auto"]]),
        (raystow.Compression, "process", ["gpu", None]),
        (raystow.Compression, "lossy", [0.5, ["weights"], "resume"]),
        (raystow.Compression, "delta", ["auto", 1.5, True, -1, 1 << 63]),
        (raystow.Replication, "replicas", ["1", None, 1.5, True, -1]),
        (raystow.Interval, "steps", ["1", 1.5, True, 0]),
        (raystow.Interval, "seconds", ["1", True, 0, -1.0, float("nan"), 1e10]),
        (raystow.Interval, "mtbf", ["6h", True, 0]),
        (raystow.Interval, "budget", ["1%", True, 0, 1.1]),
        (raystow.Replication, "rate", ["1", True, 0, -1.0, float("nan")]),
    ],
)
def test_a_group_refuses_an_invalid_value(group: Callable[..., object], name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(StateError) as refused:
            group(**{name: value})
        assert name in str(refused.value)
        assert repr(value) in str(refused.value)
        assert refused.value.remedy


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "memory": raystow.Memory(32 << 20, cache=0),
            "compression": raystow.Compression("zstd", lossy="archive", delta=1),
            "replication": raystow.Replication(0, rate=1),
            "timeout": 1,
            "on_failure": "raise",
            "interval": raystow.Interval(mtbf=3600, budget=0.005),
        },
        {
            "memory": memory_limit(),
            "compression": "zstd",
            "replication": 0,
            "interval": 100,
            "timeout": 0.5,
            "retention": raystow.Policy(),
            "on_failure": 1,
        },
    ],
)
def test_valid_arguments_are_accepted(options: Mapping[str, Any]) -> None:
    with pytest.raises(ConnectionRefusedError):
        raystow.Checkpointer("memory://arguments", **options)


@pytest.mark.parametrize(
    ("function", "name", "values"),
    [
        (dcp.Writer, "timeout", ["5", None, True, 0, -1, float("nan"), float("inf"), 1e10]),
        (dcp.Writer, "memory", ["1GB", None, 1.5 * GIB, True, 0, 1 << 50]),
        (dcp.Writer, "threads", ["4", 1.5, True, 0, -1]),
        (dcp.Reader, "threads", ["4", 1.5, True, 0, -1]),
    ],
)
def test_dcp_writer_and_reader_name_an_invalid_argument(function: Callable[..., object], name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(StateError, match=f"{name} is {re.escape(repr(value))}"):
            function("memory://arguments", **{name: value})
    function("memory://arguments", threads=1)


def test_the_error_states_the_memory_of_the_machine() -> None:
    with pytest.raises(StateError, match=f"at most the {memory_limit():,} that this machine"):
        raystow.Checkpointer("memory://arguments", memory=1 << 50)


@pytest.mark.parametrize("uri", [None, b"/tmp/r", 5])
@pytest.mark.parametrize("function", [raystow.Checkpointer, raystow.open, raystow.latest, dcp.Writer, dcp.Reader])
def test_an_address_is_text_or_a_path(function: Callable[[Any], object], uri: object) -> None:
    with pytest.raises(StateError, match=f"uri is of type {type(uri).__name__}"):
        function(uri)


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", 1 << 63, 1 << 70])
def test_a_step_is_an_integer_that_fits_into_the_format(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = checkpointer(monkeypatch, node := NoNode())
    with pytest.raises(StateError, match=f"step is {step!r} .*below 2"):
        rank.save({}, step=step)
    assert node.numbers == []


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ([1], "metrics is"),
        ("loss", "metrics is"),
        ({"loss": [1]}, "loss"),
        ({1: 2}, r"metrics\[1\]"),
        ({"n" * 70_000: 1}, "65,536"),
        ({"\ud800": 1}, "UTF-8"),
    ],
)
def test_metrics_are_plain_values_by_name(metrics: object, named: str) -> None:
    with pytest.raises(StateError, match=named):
        metrics_of(metrics)


@pytest.mark.parametrize("cut", [{"drawn": [1]}, {1: 2}, {"\ud800": 1}, [1]])
def test_an_invalid_cut_is_named_as_such(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = checkpointer(monkeypatch, node := NoNode())
    with pytest.raises(StateError, match=r"^(a name of )?cut"):
        rank.save({}, step=1, cut=cut)
    assert node.numbers == []
