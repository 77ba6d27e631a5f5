"""Which chunks of an encoder are stored as differences to an earlier version, and what is done with those.

A version that may serve is named by the node worker, in every save anew, while the encoder reads what needs none. Where
differences pay is decided once for each such version, in the first save that it is named for: from samples of all chunks, which
were taken when the version itself was saved, and are compared with samples of now. Nothing more is worked out until another
version is named.

What they take of the device is set aside when they are known to pay, for the saves that come: most trainings never need it.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ....storage.coding.delta import LEAST
from ....storage.coding.digest import finish
from ....storage.errors import Damaged, SaveFailed
from ...ipc.offers import Named, Offer
from .. import kernels
from ..bases.lanes import Lanes
from ..bases.loads import Former, load, room, serves
from . import paying
from .jobs import Aim, Source
from .program import Batch, Program

logger = logging.getLogger(__name__)

_MAY, _DOES = 1, 2  # turns: of chunks that may be differences, and the first of those that are
_TURN = 256 << 20  # raw bytes of differences in one turn, after each of which a save can go on without
_PATIENCE = 1.0  # seconds to wait for the name of a version, if it may be of use, and as long as the training does not wait
_SEEN = 2  # versions of which samples are kept, since one save may begin before the other is a version
_SAMPLES = 120 << 20  # bytes of one save's samples, at most
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Make = Callable[[Mapping[int, Aim]], Program]


@dataclass(frozen=True)
class _Sampled:
    """Chunks of one width: their numbers among the sources, and the kernels' table of them."""

    numbers: list[int]
    width: int
    rotate: bool
    table: torch.Tensor

    def take(self) -> torch.Tensor:
        """Samples of all, as they are now, on the current stream."""
        picked = torch.empty((len(self.numbers), kernels.SAMPLED), dtype=_WORDS[self.width], device=self.table.device)
        kernels.pick(self.table, picked)
        return picked


@dataclass(frozen=True)
class _Seen:
    """What is kept of a save that was whole: the sums of all chunks, before ``finish``, by number, and the samples."""

    sums: Mapping[int, int]
    samples: list[torch.Tensor]


@dataclass(frozen=True)
class _Star:
    """What is decided as long as one version is named. ``formers``: by the number of a source what that is a difference to;
    ``first``: the number of the first batch of differences in ``program``, which has these ``aims``. ``cut``: by turn the program
    that is the same up to there, and goes on without, as far as it was asked for."""

    offer: Offer
    formers: Mapping[int, Former]
    aims: Mapping[int, Aim]
    program: Program
    first: int
    cut: dict[int, Program] = field(default_factory=dict)

    def up_to(self, turn: int) -> dict[int, Aim]:
        """The aims of ``cut``."""
        return {i: aim if aim.turn < turn else Aim(aim.turn) for i, aim in self.aims.items()}


@dataclass
class Differences:
    """In every save of ``sources``: ``begin``, ``sample``, ``decide`` before the batch ``decided_at``; for every batch that
    ``differs`` what ``lanes`` want, and ``check``; ``give_way`` before one, if no more are to be differences; at last ``saved``,
    if it went well, and in any case ``end``. ``make``: a program of these sources; ``undecided``: the one as long as no version
    is named. ``pays``: something would have been stored as a difference if ``lanes`` had been settled."""

    lanes: Lanes
    sources: Sequence[Source]
    make: Make
    undecided: Program = field(init=False)
    pays: bool = False
    _sampled: list[_Sampled] = field(init=False)
    _samples: list[torch.Tensor] = field(default_factory=list)
    _seen: deque[_Seen] = field(default_factory=lambda: deque(maxlen=_SEEN))
    _star: _Star | None = None
    _refused: set[int] = field(default_factory=set)  # versions that are of no use
    _differing: bool = False
    _gave_way: bool = False

    def __post_init__(self) -> None:
        self.undecided = self.make({i: Aim(_MAY) for i in _may_differ(self.sources)})
        self._sampled = list(_sampled(self.undecided))

    def take_over(self, other: Differences) -> None:
        """What is known from the same chunks when they lay elsewhere, or from others."""
        self._refused, self.pays = other._refused, other.pays
        if _identities(other) == _identities(self):
            self._seen = other._seen

    def begin(self) -> Program:
        """What to begin with; what is decided before will most likely hold, so lanes are filled for it at once."""
        self._differing = self._gave_way = False
        if self._star is None:
            return self.undecided
        self.lanes.begin()
        return self._star.program

    @property
    def decided_at(self) -> int:
        """The number of the batch before which ``decide`` says how to go on."""
        return self.undecided.begin_of(_MAY) if self._star is None else self._star.first

    @property
    def waits_at(self) -> int:
        """The number of the batch before which the link may have to wait for what has been decided before."""
        return len(self.undecided.batches) if self._star is None else self._star.first

    def sample(self) -> None:
        """Look at some words of all chunks as they are now, on the current stream."""
        self._samples = [alike.take() for alike in self._sampled]

    def decide(
        self, named: Named, tell: Callable[[torch.Tensor], torch.Tensor], *, hurried: Callable[[], bool], waited: bool
    ) -> Program:
        """The program to go on with: the same as ``begin`` gave up to here. Waits for the name until it is ``hurried``. Anything
        is worked out for a new one, which waits for the current stream, only if it is not, and nobody has ``waited`` for the save
        before. ``tell``: a copy of int64 in host memory, there when that is through."""
        star = self._star
        offer = named(0.0 if star is None and waited else _PATIENCE, hurried)
        anew = not (waited or hurried())
        if star is not None and offer is not None and offer.id == star.offer.id:
            if offer is not star.offer and anew:
                self._star = self._lent_anew(star, offer)
            if self._star is not None:
                self._differing = True
                return self._star.program
        if star is not None and offer is None and hurried():  # it may have been named again: the next save will hear
            return self.give_way(star.first) or star.program
        if star is not None:
            self._let_go()
            return self.make(star.up_to(_DOES))
        if offer is None or offer.id in self._refused:
            return self.undecided
        if not anew:
            _note(offer, "the training waits, or has waited for the save before")
            return self.undecided
        formers, aims = self._compare(offer, tell)
        if not formers:
            self._refused.add(offer.id)
            return self.undecided
        if not self.lanes.settled:
            _note(offer, "no device memory was set aside for that; the next save will have it")
            self.pays = True
            return self.undecided
        self._star = self._decided(offer, formers, aims)
        self._differing = True
        return self._star.program

    def give_way(self, batch: int) -> Program | None:
        """The program to go on with if from this batch on nothing is to be a difference; None where that cannot be, as no turn
        begins there, or is so anyway. What was begun to come up is let be."""
        star = self._star
        if star is None or self._gave_way or not star.first <= batch < len(star.program.batches):
            return None
        turn = star.program.batches[batch].turn
        if batch != star.program.begin_of(turn):
            return None
        self._gave_way, self._differing = True, batch > star.first
        if turn not in star.cut:
            star.cut[turn] = self.make(star.up_to(turn))
        nbytes = sum(job.nbytes for job in star.program.jobs[star.program.batches[batch].first :])
        logger.info("%.1f MB are stored whole, not as differences to version %d: the training waits", nbytes / 1e6, star.offer.id)
        return star.cut[turn]

    def filled(self, batch: int, seconds: float) -> bool:
        """See ``Lanes.filled``. ``SaveFailed`` if what the batch is a difference to is damaged."""
        try:
            return self.lanes.filled(self._load(batch), seconds)
        except Damaged as error:
            raise self._damaged(error.subject, error.what) from error

    def bring(self, batch: int) -> tuple[torch.Tensor, Any]:
        """What ``kernels.split`` takes as ``bases``, and the event after which their planes are there."""
        return self.lanes.bring(self._load(batch))

    def was_read(self, batch: int, event: Any) -> None:
        """See ``Lanes.was_read``."""
        self.lanes.was_read(self._load(batch), event)

    def _load(self, batch: int) -> int:
        """The number of what lanes bring for a batch."""
        assert self._star is not None
        return batch - self._star.first

    def check(self, batch: Batch, sums: Any) -> None:
        """``SaveFailed`` unless these sums are those of what the batch's chunks are differences to."""
        star = self._star
        assert star is not None
        for job, total in zip(star.program.jobs[batch.first : batch.last], sums.tolist(), strict=True):
            if finish(total, job.nbytes) != star.formers[job.index].chunk.raw_digest:
                raise self._damaged(job.name, "the decoded bytes do not match their digest")

    def saved(self, program: Program, sums: Callable[[Batch], Any]) -> None:
        """All was read, with these ``sums`` of each batch: what is whole may be named in a later save."""
        if not self._differing:
            found = dict[int, int]()
            for batch in program.batches:
                jobs = program.jobs[batch.first : batch.last]
                found.update(zip((job.index for job in jobs), sums(batch).tolist(), strict=True))
            self._seen.append(_Seen(found, self._samples))

    def end(self) -> None:
        """The save is over, one way or the other."""
        self._samples = []
        self.lanes.end()

    def _compare(
        self, offer: Offer, tell: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[Mapping[int, Former], Mapping[int, Aim]]:
        """The chunks for which differences to a version pay, by number with what they are differences to, and the aims of all."""
        formers, aims = self._formers(offer), dict[int, Aim]()
        if not formers:
            _note(offer, "no chunk of it is in this node's memory with the same elements")
            return {}, aims
        seen = max(self._seen, key=lambda seen: len(self._known(seen, formers)), default=None)
        if seen is None or not (known := self._known(seen, formers)):
            _note(offer, "this process has not saved it")
            return {}, aims
        aims = {i: Aim(_MAY) for alike in self._sampled for i in alike.numbers}
        for alike, now, before in zip(self._sampled, self._samples, seen.samples, strict=True):
            smaller, planes = paying.pays(now, before, rotate=alike.rotate)
            told = tell(torch.cat([smaller[:, None], planes], dim=1).long())
            torch.cuda.current_stream(now.device).synchronize()
            for i, (pays, *worth) in zip(alike.numbers, told.tolist(), strict=True):
                if pays and i in known:
                    high = tuple(p for p, coded in enumerate(worth) if coded)
                    aims[i] = Aim(_DOES, offer.id, high, room(formers[i].chunk))
        formers = {i: former for i, former in formers.items() if aims[i].base}
        if not formers:
            _note(offer, "differences would not be smaller")
        return formers, aims

    def _decided(self, offer: Offer, formers: Mapping[int, Former], aims: Mapping[int, Aim]) -> _Star:
        """From now on chunks with these aims are differences to what is offered, which begins to come up."""
        nbytes = sum(former.chunk.nbytes for former in formers.values())
        logger.info("%.1f MB are stored as differences to version %d", nbytes / 1e6, offer.id)
        aims = {**aims, **self._in_turns({i: aims[i] for i in formers})}
        program = self.make(aims)
        first = program.begin_of(_DOES)
        numbered = enumerate(program.batches[first:])
        jobs = [(number, program.jobs[batch.first : batch.last]) for number, batch in numbered]
        self.lanes.end()
        self.lanes.take([load([formers[job.index] for job in some], self.lanes.address(number)) for number, some in jobs])
        self.lanes.begin()
        return _Star(offer, formers, aims, program, first)

    def _in_turns(self, aims: Mapping[int, Aim]) -> dict[int, Aim]:
        """The same, of chunks that are differences, in turns of some bytes. Those that are read together stay so."""

        def alike(i: int) -> Any:
            return self.sources[i].dtype.name, aims[i].high, self.sources[i].name.rpartition(".")[2]

        found, nbytes = dict[int, Aim](), 0
        for i in sorted(aims, key=alike):
            found[i] = replace(aims[i], turn=_DOES + nbytes // _TURN)
            nbytes += self.sources[i].nbytes
        return found

    def _lent_anew(self, star: _Star, offer: Offer) -> _Star | None:
        """The same chunks in other memory, as when planes of theirs were decoded; None if some are not in it."""
        formers = self._formers(offer)
        if not star.formers.keys() <= formers.keys():
            return None
        formers = {i: formers[i] for i in star.formers}
        aims = {i: replace(aim, room=room(formers[i].chunk)) if aim.base else aim for i, aim in star.aims.items()}
        return self._decided(offer, formers, aims)

    def _formers(self, offer: Offer) -> dict[int, Former]:
        """By the number of a source, the chunk with the same elements, where that is offered and can be brought up."""
        formers = dict[int, Former]()
        for i in (i for alike in self._sampled for i in alike.numbers):
            said = self.sources[i].describe()
            found = offer.chunks.get((said["name"], (tuple(said["offset"]), tuple(said["extent"]))))
            if found is None or (found.chunk.dtype, found.chunk.shape) != (said["dtype"], tuple(said["shape"])):
                continue
            if serves(found.chunk) and room(found.chunk) <= self.lanes.size:
                formers[i] = Former(found.chunk, found.parts)
        return formers

    def _known(self, seen: _Seen, formers: Mapping[int, Former]) -> set[int]:
        """Those whose sample is one of the very bytes that are offered."""
        found = ((i, former.chunk) for i, former in formers.items())
        return {i for i, chunk in found if finish(seen.sums[i], chunk.nbytes) == chunk.raw_digest}

    def _damaged(self, name: str, what: str) -> SaveFailed:
        """The save fails, and no later one looks at that version again."""
        assert self._star is not None
        id = self._star.offer.id
        self._refused.add(id)
        self._let_go()
        return SaveFailed(
            f"it was to be stored as a difference to version {id}, which is damaged in this node's memory: {what}",
            subject=name,
            remedy="save again: it will be stored whole",
        )

    def _let_go(self) -> None:
        """Of the version that was named: its memory must not outlive what the node worker keeps it for."""
        self.lanes.end()
        self.lanes.take([])
        self._star = None


def samples_of(sources: Sequence[Source]) -> int:
    """Bytes of device memory that are taken, at most, to tell where differences pay."""
    return (_SEEN + 1) * sum(kernels.SAMPLED * sources[i].dtype.width for i in _may_differ(sources))


def _may_differ(sources: Sequence[Source]) -> list[int]:
    """The numbers of those that may be differences: the largest, as many as there is room for samples of."""
    large = [i for i, source in enumerate(sources) if source.address is not None and source.nbytes >= LEAST]
    large.sort(key=lambda i: sources[i].nbytes, reverse=True)
    taken = itertools.accumulate(kernels.SAMPLED * sources[i].dtype.width for i in large)
    found = [i for i, size in zip(large, taken, strict=True) if size <= _SAMPLES]
    if len(found) < len(large):
        logger.info("%d chunks are stored whole: the %d larger ones may be differences", len(large) - len(found), len(found))
    return found


def _note(offer: Offer, why: str) -> None:
    logger.info("chunks on a GPU are stored whole, not as differences to version %d: %s", offer.id, why)


def _sampled(program: Program) -> list[_Sampled]:
    """The chunks of a program that may be differences, by width."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for row, job in enumerate(program.jobs):
        if job.coded and job.aim.turn:
            alike.setdefault((job.width, job.dtype.rotate), []).append(row)
    device = program.chunks.device
    return [
        _Sampled([program.jobs[row].index for row in rows], *of, torch.from_numpy(program.table[rows]).to(device))
        for of, rows in alike.items()
    ]


def _identities(one: Differences) -> Any:
    return [source.identity for source in one.sources], [alike.numbers for alike in one._sampled]
