"""Play one seed and report its outcome."""

from __future__ import annotations

from dataclasses import dataclass

from .cluster import Cluster
from .fakes import fakes
from .journal import Violation


@dataclass(frozen=True)
class Outcome:
    """The outcome of a seed. ``broken`` is the violated invariant (empty if none), ``report`` its description for a person."""

    seed: int
    digest: str
    events: int
    versions: int
    broken: str = ""
    report: str = ""


def play(seed: int) -> Outcome:
    """Play one seed. An unexpected error is an outcome too."""
    cluster = Cluster(seed)
    with fakes(cluster):
        broken = what = ""
        try:
            cluster.play()
        except Violation as violation:
            broken, what = violation.invariant, violation.what
        except Exception as error:
            broken, what = "nothing crashes", repr(error)
            if error.__traceback__ is not None:
                at = error.__traceback__
                while at.tb_next is not None:
                    at = at.tb_next
                what += f" at {at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}"
    report = ""
    if broken:
        last = "\n".join(cluster.journal.lines())
        report = f"seed {seed}: {broken}: {what}\n\nThe last events:\n{last}\n\nAgain: python -m tests.simulation {seed}\n"
    return Outcome(seed, cluster.journal.digest, cluster.journal.events, len(cluster.watch.committed), broken, report)
