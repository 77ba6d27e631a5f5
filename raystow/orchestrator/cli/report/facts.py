"""What a report tells, counted from the root and the version records. Knows nothing of how it looks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from ....storage.errors import Damaged, NotFound, RaystowError, Unsupported, Untrusted
from ....storage.format.version_record import RestoreInfo, VersionRecord
from ....storage.version import Version
from ..bill import GB, MONTH, Prices
from ..target import Target

_READERS = 16  # records are small, and far away


@dataclass(frozen=True)
class Saved:
    """A version. ``pins``: its names. ``stall`` in seconds, None if nobody has told; ``problem``: why its record cannot be read,
    and with it nothing but what the root says."""

    id: int
    step: int
    created: float
    raw: int
    stored: int
    pins: tuple[str, ...] = ()
    world_size: int | None = None
    stall: float | None = None
    restores: tuple[RestoreInfo, ...] = ()
    problem: str = ""

    @property
    def ratio(self) -> float | None:
        """Stored bytes by raw bytes; None where there are none."""
        return self.stored / self.raw if self.raw else None


@dataclass(frozen=True)
class Dollars:
    """What a version has cost so far: ``store`` for its stored bytes, ``raw_store`` for them without compression, ``stall`` for
    GPUs that waited."""

    store: float
    raw_store: float
    stall: float


@dataclass(frozen=True)
class Tariff:
    """The user's prices. ``gpus``: how many wait while a save holds the training up; None: one for each rank of the save."""

    prices: Prices
    gpus: int | None = None

    def of(self, saved: Saved, now: float) -> Dollars:
        """A version from its making until ``now``."""
        rent = max(0.0, now - saved.created) / MONTH * self.prices.gb_month / GB
        gpus = self.gpus if self.gpus is not None else saved.world_size or 0
        return Dollars(saved.stored * rent, saved.raw * rent, (saved.stall or 0.0) / 3600 * gpus * self.prices.gpu_hour)


@dataclass(frozen=True)
class Facts:
    """A repository at a moment, ``made``: ``versions`` oldest first, of ``live`` that there are."""

    uri: str
    repository: str
    made: float
    live: int
    live_stored: int
    versions: Sequence[Saved]
    tariff: Tariff | None = None

    @cached_property
    def restores(self) -> list[RestoreInfo]:
        """Every restore that a version tells of, in the order of time. A version that was given up, and became one all the same,
        may have left its restores to the next one as well: told once."""
        return sorted({(r.at, r.version): r for saved in self.versions for r in saved.restores}.values(), key=lambda r: r.at)

    @cached_property
    def problems(self) -> list[Saved]:
        """The versions whose records cannot be read."""
        return [saved for saved in self.versions if saved.problem]

    @cached_property
    def stalls(self) -> list[float]:
        """The stalls that are known, in seconds."""
        return [saved.stall for saved in self.versions if saved.stall is not None]

    @property
    def median_stall(self) -> float | None:
        """In seconds; None where no version tells."""
        return median(self.stalls) if self.stalls else None

    @cached_property
    def dollars(self) -> list[Dollars]:
        """What each version has cost; empty without prices."""
        return [self.tariff.of(saved, self.made) for saved in self.versions] if self.tariff else []


def gather(target: Target, *, newest: int, tariff: Tariff | None = None) -> Facts:
    """Read the records of the ``newest`` versions, several at a time. What cannot be read of one is told, and ends nothing."""
    versions = target.versions()
    with ThreadPoolExecutor(_READERS, "raystow-report") as pool:
        found = list(pool.map(lambda version: _saved(target, version), versions[-newest:]))
    return Facts(
        uri=target.repository.uri,
        repository=target.repository.id,
        made=target.repository.clock.now(),
        live=len(versions),
        live_stored=sum(version.bytes for version in versions),
        versions=found,
        tariff=tariff,
    )


def _saved(target: Target, version: Version) -> Saved:
    record: VersionRecord | None = None
    problem = ""
    try:
        record = version.record
    except (Damaged, NotFound, Unsupported, Untrusted) as error:
        problem = _told(error)
    return Saved(
        id=version.id,
        step=version.step,
        created=version.created,
        raw=version.raw,
        stored=version.bytes,
        pins=tuple(target.pins(version.id)),
        world_size=record.world_size if record is not None else None,
        stall=record.stall if record is not None else None,
        restores=record.restores if record is not None else (),
        problem=problem,
    )


def _told(error: RaystowError) -> str:
    return f"{type(error).__name__}: {error}"
