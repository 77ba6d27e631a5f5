"""``raystow cp``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated

import typer

from ..storage.copies.copy import CopyPlan, plan_copy
from ..storage.errors import NotFound, StoreUnavailable
from ..storage.runtime.clock import SYSTEM
from ..storage.versions.version import Version
from . import options
from .exit_codes import print_error
from .options import Json
from .output import count, emit, say, size
from .progress import progress_bar


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Repository to copy from.", show_default=False)],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="Replica; it is created if nothing is there.", show_default=False)
    ],
    versions: Annotated[
        list[str] | None,
        typer.Option("--versions", metavar="VERSION", help="Copy this version and its bases; may be repeated. By default, all."),
    ] = None,
    sign: Annotated[bool, typer.Option("--sign", help="Sign the copies with RAYSTOW_SIGNING_KEY.")] = False,
    memory: Annotated[int, options.size(help="Copy so many bytes of packs at a time.")] = "256MiB",  # type: ignore[assignment]
    watch: Annotated[bool, typer.Option("--watch", help="Copy new versions until Ctrl-C or SIGTERM.")] = False,
    interval: Annotated[float, options.time(help="With --watch, time between looks at SRC.")] = "30s",  # type: ignore[assignment]
    json: Json = False,
) -> None:
    """Copy versions to another store, which becomes a replica.

    The copies keep ids, bytes and signatures, and every digest is checked. An interrupted copy is continued. SRC's latest version
    is copied with its segments of the step journal. Versions are added in the order of their ids: an older one than DST's newest
    needs an empty DST. A rollback of SRC is repeated unless --versions is given. Pins are not copied. A DST that a training has
    saved to is refused. A pack larger than --memory is copied alone.

    Example:  raystow cp s3://bucket/runs/llama /backup/llama --watch
    """
    if watch and (json or versions):
        raise typer.BadParameter("--watch copies all versions and prints text: omit --json and --versions")

    def plan() -> CopyPlan:
        return plan_copy(source, destination, versions or None, sign=sign, memory=memory)

    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(plan, interval)
        return
    planned = plan()
    copied = _copy(planned, quiet=json)
    if json:
        emit(
            {
                "source": planned.source.uri,
                "uri": planned.replica.uri,
                "copied": [version.id for version in copied],
                "segments": [segment.number for segment in planned.segments],
                "bytes": planned.stored,
                "older": planned.older,
                "rollback": planned.rollback or None,
            }
        )
        return
    say(_outcome(planned, copied))
    if planned.older:
        ids = ", ".join(map(str, planned.older))
        say(f"not copied, because DST has seen newer ones: {count(len(planned.older), 'version')} ({ids})")
    if not versions and (rolled_back := len(planned.source_root.listed) - len(planned.source_root.versions)):
        say(f"not copied: {count(rolled_back, 'rolled-back version')}")


def _copy(plan: CopyPlan, *, quiet: bool) -> list[Version]:
    with progress_bar("copying", plan.stored, quiet=quiet) as advance:
        return plan.execute(advance)


def _outcome(plan: CopyPlan, copied: list[Version]) -> str:
    done = [f"rolled back to version {plan.rollback}"] if plan.rollback else []
    ids = ", ".join(str(version.id) for version in copied)
    what = [f"{count(len(copied), 'version')} ({ids})"] if copied else []
    what += [f"steps up to {plan.segments[-1].step}"] if plan.segments else []
    done += [f"copied {' and '.join(what)}, {size(plan.stored)}" if what else "nothing to copy"]
    return "; ".join(done)


def _watch(plan: Callable[[], CopyPlan], interval: float) -> None:
    """Copy what is new, again and again. Failures of a store, and versions that are dropped meanwhile, are tried again."""
    first = True
    while True:
        try:
            planned = plan()
            copied = _copy(planned, quiet=False)
            if copied or planned.segments or planned.rollback or first:
                say(_outcome(planned, copied))
            first = False
        except (StoreUnavailable, NotFound) as error:
            print_error(error)
        SYSTEM.sleep(interval)
