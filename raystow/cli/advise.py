"""``raystow advise``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ..orchestrator.save_interval import LEAST, best_interval, lost_share, time_between_failures
from ..storage.errors import NotFound
from . import options
from .options import Json, Uri, number, seconds
from .output import count, duration, emit, say
from .run_history import RunHistory, read_history
from .target import open_target

_LEAST = 1e-9  # seconds or percent


@dataclass(frozen=True)
class Figure:
    """A number of seconds, and where it comes from."""

    seconds: float
    source: str


def advise(
    uri: Uri,
    mtbf: Annotated[float | None, options.time(help="Mean time between failures: 6h, 2d; by default observed.")] = None,
    stall: Annotated[float | None, seconds(help="Delay of the training by a save; by default the recorded median.")] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="The largest part of the time that saves may take: 0.5.")
    ] = None,
    newest: Annotated[int, number(help="Read the records of the newest N versions.")] = 500,
    json: Json = False,
) -> None:
    """Recommend how often to save, and say where the numbers come from.

    The best interval is sqrt(2 x stall x mean time between failures) (Young 1974, Daly 2006), with the recorded stalls. The time
    between failures is the time of the run divided by its recorded restores, planned restarts included, or --mtbf. With fewer
    than two restores, a study of large clusters is used (Kokolis et al. 2024). Without --mtbf the interval is at least a minute.
    Checkpointer.due computes the same, and waits until a save is durable.

    Example:  raystow advise s3://bucket/runs/llama --mtbf 12h --budget 0.5
    """
    for option, value in (("--mtbf", mtbf), ("--stall", stall), ("--budget", budget)):
        if value is not None and not _LEAST <= value < float("inf"):
            raise typer.BadParameter(f"{option} must be at least {_LEAST}")
    if budget is not None and budget > 100:
        raise typer.BadParameter("--budget must be at most 100")
    history = read_history(open_target(uri), newest=newest)
    cost = Figure(stall, "as given") if stall is not None else _stall(history)
    failures = Figure(mtbf, "as given") if mtbf is not None else observed_mtbf(history)
    share, least = budget / 100 if budget is not None else None, LEAST if mtbf is None else 0.0
    interval = best_interval(cost.seconds, failures.seconds, share, least=least)
    if not interval:
        raise typer.BadParameter("saves have recorded no stall: give --stall")
    step, present = history.seconds_per_step, history.interval
    now = lost_share(present, cost.seconds, failures.seconds) if present else None
    lost = lost_share(interval, cost.seconds, failures.seconds)
    if json:
        emit(
            {
                "uri": history.uri,
                "interval": interval,
                "steps": max(1, round(interval / step)) if step else None,
                "lost": lost,
                "present": {"interval": present, "lost": now} if present else None,
                "stall": cost,
                "mtbf": failures,
                "seconds_per_step": step,
            }
        )
        return
    steps = f" ({count(max(1, round(interval / step)), 'step')})" if step else ""
    say(f"save every {duration(interval)}{steps}: {100 * lost:.2f} % of the time is lost to saves and failures")
    if present and now is not None:
        say(f"at present every {duration(present)}: {100 * now:.2f} %")
    say(f"- stall of a save {duration(cost.seconds)}: {cost.source}")
    say(f"- time between failures {duration(failures.seconds)}: {failures.source}")
    if step:
        say(f"- a step takes {duration(step)}: median between versions")
    if budget is not None:
        say(f"- saves may take {budget:g} % of the time: an interval of at least {duration(cost.seconds * 100 / budget)}")


def _stall(history: RunHistory) -> Figure:
    if history.median_stall is None:
        raise NotFound("no stall of a save is recorded", subject=history.uri, remedy="give --stall SECONDS")
    return Figure(history.median_stall, f"median of {count(len(history.stalls), 'recorded save')}")


def observed_mtbf(history: RunHistory) -> Figure:
    """The mean time between failures of a run."""
    created = [saved.created for saved in history.versions]
    span = created[-1] - created[0] if created else 0.0
    restores = sum(restore.at > created[0] for restore in history.restores) if span > 0 else 0
    ranks = max((saved.world_size or 1 for saved in history.versions), default=1)
    assumed = f"less than two restores are recorded, so that of a study, for {count(ranks, 'rank')}"
    source = f"observed: {restores} restores in {duration(span)}" if restores > 1 else assumed
    return Figure(time_between_failures(span, restores, ranks), source)
