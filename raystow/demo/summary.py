"""The summary that the demo prints at its end."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from ..cli.output import ratio_text, size, table
from ..storage.repository import Repository
from .events import Event, select
from .outcome import Comparison, Failure, stalls
from .settings import DISTURBED


def summary(repository: Repository, events: list[Event], fail: Failure, result: Comparison) -> Iterator[RenderableType]:
    """Yield the table of versions, the course of the failure, the result, and commands to try."""
    yield _versions(repository, events)
    yield Text()
    yield _course(fail)
    yield Text()
    yield _verdict(fail, result)
    yield Text()
    yield Text("Try next:", style="bold")
    yield Text(f"  raystow show {repository.uri}")
    yield Text(f"  raystow verify {repository.uri} --all")


def _versions(repository: Repository, events: list[Event]) -> RenderableType:
    began = select(events, "run", run=DISTURBED)[0]["time"]
    stall = stalls(events, DISTURBED)
    rows = [
        (
            str(v.id),
            str(v.step),
            f"{v.created - began:.1f}",
            size(v.raw),
            size(v.bytes),
            ratio_text(v.bytes, v.raw),
            f"{stall[v.id] * 1000:.0f}" if v.id in stall else "-",
        )
        for v in repository.versions()
    ]
    headers = (">version", ">step", ">time s", ">raw", ">stored", ">ratio", ">stall ms")
    return table("Versions of the run with the failure", headers, rows)


def _course(fail: Failure) -> RenderableType:
    lost, replayed = fail.step - fail.reached, fail.reached - fail.restored_step
    rows = [
        ("0.0", f"node killed during the save of step {fail.step}: raylet and workers", f"{fail.processes} processes"),
        (f"{fail.detected:.1f}", "failure detected by Ray Train, which restarts the workers", ""),
        (f"{fail.restored:.1f}", f"restored from version {fail.version}, step {fail.restored_step}", ""),
        ("", f"replayed {replayed} recorded steps, up to step {fail.reached}", f"lost: {lost} steps"),
        (f"{fail.durable:.1f}", "next version durable; the number of the save that failed is not used again", ""),
    ]
    return table("The failure", (">after s", "event", ""), rows)


def _verdict(fail: Failure, result: Comparison) -> Text:
    if result.same:
        return Text(
            f"Bit for bit the same as without the failure: all {result.tensors} final tensors and all {result.losses} losses "
            f"from step {fail.reached + 1} on.",
            style="bold green",
        )
    return Text(
        f"NOT the same as without the failure: {len(result.differ)} of {result.tensors} tensors differ "
        f"({', '.join(result.differ[:3])}) and {result.losses_differ} of {result.losses} losses.",
        style="bold red",
    )
