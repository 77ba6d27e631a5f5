"""``raystow top``: what the saves of a run are at, live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.live import Live

from ...storage.clock import SYSTEM, Clock
from ...storage.stores import open_store
from .present import emit, out
from .quantities import duration
from .sight import facts, run_of
from .target import Json
from .top_view import view

if TYPE_CHECKING:
    from ..snapshot import Snapshot

_AROUND = 14  # lines beside those of nodes and failures
_SMALLEST = 0.2  # seconds between two looks


class Looking(Protocol):
    """Whoever can see the cluster: ``observing.Observer``."""

    def look(self) -> Snapshot:
        """The cluster now."""


def top(
    uri: Annotated[
        str | None,
        typer.Argument(metavar="URI", help="The run's repository; not needed if it is the only one.", show_default=False),
    ] = None,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The Ray cluster; by default the one of this machine.")
    ] = "auto",
    interval: Annotated[str, typer.Option(metavar="TIME", help="From one look to the next.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end; as where the output is no terminal.")] = False,
    json: Json = False,
) -> None:
    """Show what the saves of a run are at: live, until Ctrl-C.

    Saves under way and whom they wait for, the stage of every node and rank, bytes a second, queues, memory and copies, and the
    last saves that were given up. Needs a machine of the Ray cluster. It starts nothing, and disturbs nobody.

    Example:  raystow top s3://bucket/runs/llama
    """
    from ..coordinator_actor import coordinator_name
    from ..observing import Observer

    observer = Observer(address)
    sights = watch(observer, coordinator_name(open_store(uri).uri) if uri else "", SYSTEM, max(_SMALLEST, duration(interval)))
    if json or once or not out.is_terminal:
        next(sights)  # rates are differences between two looks
        sight = next(sights)
        emit(sight) if json else out.print(view(sight))
        return
    try:
        show(sights)
    except KeyboardInterrupt:
        pass  # the way to end it


def watch(observer: Looking, name: str, clock: Clock, interval: float) -> Iterator[dict[str, Any]]:
    """The facts of the run of a coordinator, look by look. ``ClusterError`` if there is no such run when the first look is taken;
    later, what it said last stays."""
    before = observer.look()
    name = run_of(before, name)
    known = before.coordinators[name]
    yield facts(name, before, before, known)
    while True:
        clock.sleep(interval)
        now = observer.look()
        known = now.coordinators.get(name) or known
        yield facts(name, before, now, known)
        before = now if now.nodes else before


def show(sights: Iterator[dict[str, Any]]) -> None:
    """On the whole terminal, which is as before afterwards."""
    first = next(sights)
    with Live(view(first, rows=out.height - _AROUND), console=out, screen=True, auto_refresh=False) as live:
        for sight in sights:
            live.update(view(sight, rows=out.height - _AROUND), refresh=True)
