"""The history of a run for ``raystow report``: versions, stalls, restores and costs, read from the root and the version
records."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from ..storage.errors import Damaged, NotFound, Unsupported, Untrusted
from ..storage.format.replica_difference import ReplicaDifference
from ..storage.format.version_record import RestoreInfo
from ..storage.versions.version import Version
from . import provenance
from .pricing import GB, MONTH, Prices
from .target import Target

_DIFFERENCES = 100  # listed
_READERS = 16  # threads; records are small, so that latency dominates


@dataclass(frozen=True)
class CostSoFar:
    """Dollars for a version: its stored bytes, the same uncompressed, and the GPUs that waited."""

    store: float
    raw_store: float
    stall: float


@dataclass(frozen=True)
class SavedVersion:
    """A version. ``stall``: seconds, None if unknown; ``metrics``: those that are finite numbers; ``origin``: where it comes
    from, texts by name; ``problem``: why its record cannot be read; then it has only the root's facts; ``dollars``: its cost so
    far, None without prices."""

    id: int
    step: int
    created: float
    raw: int
    stored: int
    pins: tuple[str, ...] = ()
    world_size: int | None = None
    stall: float | None = None
    restores: tuple[RestoreInfo, ...] = ()
    differences: tuple[ReplicaDifference, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    dollars: CostSoFar | None = None

    @property
    def ratio(self) -> float | None:
        """Stored bytes divided by raw bytes; None without raw bytes."""
        return self.stored / self.raw if self.raw else None


@dataclass(frozen=True)
class Tariff:
    """The user's prices, and the GPUs that wait during a stall; None: one per rank of the save."""

    prices: Prices
    gpus: int | None = None

    def priced(self, saved: SavedVersion, now: float) -> SavedVersion:
        """Return a version with its cost from its save until ``now``."""
        rent = max(0.0, now - saved.created) / MONTH * self.prices.gb_month / GB
        gpus = self.gpus if self.gpus is not None else saved.world_size or 0
        stall = (saved.stall or 0.0) / 3600 * gpus * self.prices.gpu_hour
        return replace(saved, dollars=CostSoFar(saved.stored * rent, saved.raw * rent, stall))


@dataclass(frozen=True)
class RunHistory:
    """A repository at the time ``made``: ``versions``, oldest first, are the newest of the ``live`` versions. ``exports`` and
    ``failed_exports``: see ``Root``."""

    uri: str
    repository: str
    made: float
    live: int
    live_stored: int
    versions: Sequence[SavedVersion]
    tariff: Tariff | None = None
    exports: Mapping[str, int] = field(default_factory=dict)
    failed_exports: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def restores(self) -> list[RestoreInfo]:
        """All recorded restores by time, each once: an attempt that was aborted but committed may pass its restores on as
        well."""
        return sorted({(r.at, r.version): r for saved in self.versions for r in saved.restores}.values(), key=lambda r: r.at)

    @cached_property
    def differences(self) -> list[tuple[SavedVersion, ReplicaDifference]]:
        """What ranks held differently, of the newest versions with differences."""
        found = [(saved, one) for saved in reversed(self.versions) for one in saved.differences]
        return found[:_DIFFERENCES]

    @cached_property
    def problems(self) -> list[SavedVersion]:
        """The versions whose records cannot be read."""
        return [saved for saved in self.versions if saved.problem]

    @cached_property
    def stalls(self) -> list[float]:
        """The known stalls in seconds."""
        return [saved.stall for saved in self.versions if saved.stall is not None]

    @property
    def median_stall(self) -> float | None:
        """In seconds; None if no stall is known."""
        return median(self.stalls) if self.stalls else None

    @property
    def interval(self) -> float | None:
        """The median seconds from a version to the next one; None without two versions."""
        return median(time for time, _ in self._gaps) if self._gaps else None

    @property
    def seconds_per_step(self) -> float | None:
        """The median between versions; None without two versions."""
        return median(time / steps for time, steps in self._gaps) if self._gaps else None

    @cached_property
    def _gaps(self) -> list[tuple[float, int]]:
        """Seconds and steps from each version to the next one, where both grow."""
        pairs = itertools.pairwise(self.versions)
        gaps = ((after.created - before.created, after.step - before.step) for before, after in pairs)
        return [(time, steps) for time, steps in gaps if time > 0 and steps > 0]


def read_history(target: Target, *, newest: int, tariff: Tariff | None = None) -> RunHistory:
    """Read the records of the ``newest`` versions in parallel. An unreadable record is noted in its version's ``problem``."""
    versions, now = target.versions(), target.repository.clock.now()
    with ThreadPoolExecutor(_READERS, "raystow-report") as pool:
        found = list(pool.map(lambda version: _saved(target, version), versions[-newest:]))
    return RunHistory(
        uri=target.uri,
        repository=target.repository.id,
        made=now,
        live=len(versions),
        live_stored=sum(version.bytes for version in versions),
        versions=[tariff.priced(saved, now) for saved in found] if tariff else found,
        tariff=tariff,
        exports=target.root.exports,
        failed_exports=target.root.failed_exports,
    )


def _saved(target: Target, version: Version) -> SavedVersion:
    pins = tuple(target.pins(version.id))
    saved = SavedVersion(version.id, version.step, version.created, version.raw, version.bytes, pins)
    try:
        record = version.record
    except (Damaged, NotFound, Unsupported, Untrusted) as error:
        return replace(saved, problem=f"{type(error).__name__}: {error}")
    return replace(
        saved,
        world_size=record.world_size,
        stall=record.stall,
        restores=record.restores,
        differences=record.differences,
        metrics=_numbers(record.metrics),
        origin={name: text for name, text in provenance.lines(version) if text},
    )


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """The metrics that can be drawn."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    return {name: float(value) for name, value in numbers.items() if abs(value) < 1e300}
