"""The options of a ``Checkpointer`` in groups. Each value is checked when the group is made; nothing is started by it."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from ...state.lossy.profiles import Lossy
from ...state.lossy.rules import RuleSelector
from ...storage.arguments import integer, refused
from ...storage.errors import StateError
from ...workers.staging.plan import CODECS, HOSTS, PROCESSES
from ...workers.usage import AFTERWARDS
from ..argument_checks import LONGEST, memory_of_a_rank, one_of, positive

logger = logging.getLogger(__name__)

_DEFAULT_STAGING = 1 << 30
_SLACK = 256 << 20

_Group = TypeVar("_Group")


@dataclass(frozen=True)
class Memory:
    """Limit the host memory that saves take and that cached versions take.

    Args:
        staging: Bytes per rank for staged and encoded data together, at least 32 MiB. None: enough for one whole save, but at
            most this rank's share of half of the machine's memory, and at least 1 GiB; 1 GiB for what only the CPU encodes.
        cache: Bytes per node (not per rank) for its part of the newest version, which restores read first. A part that does not
            fit is not cached; 0 turns the cache off. None: a quarter of the machine's memory. A rank whose share of the cache is
            at least 7/8 of its state on GPUs pins that much host memory, and 1 GiB: the GPU writes the version there, and no copy
            of it is needed. The version leaves that memory as the next save fills it.
        journal: Bytes per node for recorded steps; see ``Checkpointer.journal``. None: an eighth of the machine's memory.
        cache_seconds: Seconds for which a node keeps its memory, and is busy for Ray, after the last Checkpointer there has
            closed; at least 600 after a failure. Data that is not durable stays longer.

    Raises:
        StateError: A value is not a number in the allowed range.
    """

    staging: int | None = None
    cache: int | None = None
    journal: int | None = None
    cache_seconds: float = AFTERWARDS

    def __post_init__(self) -> None:
        if self.staging is not None:
            memory_of_a_rank(self.staging, name="Memory.staging", instead="None")
        if self.cache is not None:
            integer("Memory.cache", self.cache, least=0, instead="None")
        if self.journal is not None:
            integer("Memory.journal", self.journal, least=0, instead="None")
        positive("Memory.cache_seconds", self.cache_seconds, most=LONGEST)


@dataclass(frozen=True)
class Compression:
    """Choose how tensors are encoded.

    Args:
        codec: The codec of tensors on a GPU: "auto", "deflate", "zstd", "ans", "raw", or "cpu", which encodes them on the CPU.
            See ``docs/gpu.md``.
        host: Where floating-point tensors in host memory are encoded: "cpu", or "auto": on the current CUDA device, if the
            training has initialized CUDA, they have 256 MiB or more, and 3 GiB of device memory are free at the first save.
            Else on the CPU, unless a quarter of the cores, or fewer that are idle, would encode slower than the store takes
            bytes: then they are stored raw. ``delta`` and ``lossy`` always encode. ``raystow show`` prints the reason.
        process: The process that encodes tensors on a GPU. "training": the training process, which slows training least.
            "node": the node worker; the training process only copies tensors to 256 MiB of shared device memory.
        lossy: Tensors that are stored with fewer bits: the profile "resume-bounded" or "archive", or rules by group such as
            ``{"exp_avg": MantissaBits(5)}``. None: every bit is stored. See ``docs/compression.md``.
        delta: The number of versions in a row that may be stored as deltas to one whole version, for tensors that the CPU
            encodes. 0: every version is whole. None: as many as reduce the total size, at most 16. See ``docs/tuning.md``.

    Raises:
        StateError: A value is not one of those listed.
    """

    codec: str = "auto"
    process: str = "training"
    host: str = "auto"
    lossy: Mapping[str, RuleSelector] | str | None = None
    delta: int | None = None

    @property
    def may_be_raw(self) -> bool:
        """Whether tensors in host memory may be stored without coding: nothing here asks for coding by the node's CPU."""
        return self.host == "auto" and self.codec != "cpu" and not self.delta and not Lossy.of(self.lossy).rules

    def __post_init__(self) -> None:
        one_of("Compression.codec", self.codec, CODECS)
        one_of("Compression.process", self.process, PROCESSES)
        one_of("Compression.host", self.host, HOSTS)
        Lossy.of(self.lossy)
        if self.delta is not None:
            integer("Compression.delta", self.delta, least=0, instead="None")


@dataclass(frozen=True)
class Replication:
    """Choose how many other nodes hold a copy of the newest version in memory.

    Args:
        replicas: The number of other nodes. Nodes with a different ``zone`` label are preferred. 0: no copies.
        rate: The most bytes per second that each node sends for replication. None: no limit.

    Raises:
        StateError: ``replicas`` is not an integer of at least 0, or ``rate`` is not a number above 0.
    """

    replicas: int = 1
    rate: float | None = None

    def __post_init__(self) -> None:
        integer("Replication.replicas", self.replicas, least=0)
        if self.rate is not None:
            positive("Replication.rate", self.rate, instead="None")


@dataclass(frozen=True)
class Interval:
    """Choose at which steps ``Checkpointer.due`` tells to save.

    Without ``steps`` and ``seconds`` the interval is the one that loses the least time to saves and failures (Young and Daly),
    from measured stalls, but never shorter than the time until a save is durable. ``docs/tuning.md`` explains it.

    Args:
        steps: Save every so many steps.
        seconds: Save every so many seconds.
        mtbf: The mean seconds between failures. None: as the run's restores show; until there is one, 6.5 failures per 1,000
            days of eight ranks.
        budget: The largest share of the time by which saves may delay the training, such as 0.005.

    Raises:
        StateError: A value is out of range, or one excludes another.
    """

    steps: int | None = None
    seconds: float | None = None
    mtbf: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            integer("Interval.steps", self.steps, least=1, instead="None")
        for name, most in (("seconds", LONGEST), ("mtbf", float("inf")), ("budget", 1)):
            if (value := getattr(self, name)) is not None:
                positive(f"Interval.{name}", value, most=most, instead="None")
        given = [name for name in ("steps", "seconds") if getattr(self, name) is not None]
        given += ["mtbf and budget"] if self.mtbf is not None or self.budget is not None else []
        if len(given) > 1:
            raise StateError(f"Interval has {' and '.join(given)}", remedy="give steps, or seconds, or mtbf and budget")


def default_staging(nbytes: int, *, ranks: int, machine: int) -> int:
    """The default of ``Memory.staging`` for a rank that stores ``nbytes`` in the ring until they are uploaded, one of ``ranks``
    ranks on a machine with ``machine`` bytes of memory, apart from the states of these ranks in it.

    Enough for one whole save, so that staging does not wait for uploads, but at most this rank's share of half the machine. At
    least 1 GiB.
    """
    return max(_DEFAULT_STAGING, min(nbytes * 8 // 7 + _SLACK, machine // 2 // ranks))


def usable_codec(codec: str) -> str:
    """``codec`` if it is available. If it is not, "auto" becomes "cpu" with a warning, and any other is a ``StateError``.

    Nothing is loaded without a GPU: no tensor needs a codec of GPUs then.
    """
    torch = sys.modules.get("torch")
    if codec == "cpu" or torch is None or not torch.cuda.is_available():
        return codec
    from ...workers import gpu

    problem = gpu.missing()
    if problem is None:
        return codec
    if codec != "auto":
        what = f"codec {codec!r} is not available: {problem}"
        raise StateError(what, remedy='install what is missing, or pass Compression("cpu")')
    logger.warning("the CPU compresses tensors of the GPU, at a hundredth of the speed: %s", problem)
    return "cpu"


def option(name: str, value: object, group: type[_Group], plain: type) -> _Group:
    """``value`` as a group of options: a plain value is the group's first one."""
    if isinstance(value, group):
        return value
    if type(value) is not plain:
        first = next(iter(inspect.signature(group).parameters))
        raise refused(name, value, f"a raystow.{group.__name__}, or its {first}")
    return cast(Callable[[object], _Group], group)(value)
