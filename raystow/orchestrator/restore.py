"""Puts a version back into a training state: tensors and arrays in place, other values where the state holds them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timezone
from typing import Any

import numpy as np

from ..storage.coding import dtypes
from ..storage.errors import Damaged, StateError, Unsupported
from ..storage.finder import Finder, Found, Seeker
from ..storage.format import values
from ..storage.format.boxes import overlap
from ..storage.format.manifest import Chunk
from ..storage.format.selection import Sought
from ..storage.log import about
from ..storage.reader import Reader, Request, Run
from ..storage.repository import Repository
from ..storage.uncollected import uncollected
from ..storage.version import Version
from .agreement import Agreement
from .restore_plan import FROM_STORE, RestorePlan, Sources, build
from .shards import Shard, overlaps, shard_of
from .state import Leaf, flatten, replace, show

logger = logging.getLogger(__name__)

Progress = Callable[[int], None]
_LISTED = 10  # names in an error; the rest is counted


def _silent(nbytes: int) -> None:
    pass


class _Lacks(StateError):
    """The version is whole, but holds less than is asked for: it was thinned, or is of another state."""


@uncollected()
def restore(
    version: Version,
    into: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    strict: bool = True,
    cast: bool = False,
    progress: Progress = _silent,
) -> None:
    """Fill ``into`` from ``version``, bit for bit; each rank reads the chunks that overlap its own shards.

    With ``strict``, names that only one side has are an error before anything is changed; without it they are left alone. A
    tensor whose shape differs from what was saved is always an error, and so is another dtype, unless ``cast`` asks for
    conversion. If reading fails half-way (``Damaged``, ``StoreError``), the content of ``into`` is undefined. ``progress`` is
    told the decoded bytes of each chunk. ``world_size``: tells where in a large manifest to look first.
    """
    plan_restore(version, into, rank=rank, world_size=world_size, strict=strict, cast=cast).execute(progress)


@uncollected()
def plan_restore(
    version: Version,
    into: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    strict: bool = True,
    cast: bool = False,
    sources: Sources = FROM_STORE,
    filled: Collection[str] = (),
) -> RestorePlan:
    """What ``restore`` would read, checked as it does; ``execute()`` of the plan does it. Changes nothing before.

    ``filled``: tensors that may be filled from another version by now; ``StateError`` unless this one has them all.
    """
    leaves = flatten(into, what="into")
    shards = {leaf.name: _shard(leaf) for leaf in leaves if not _is_replaced(leaf)}
    sought = {leaf.name: _sought(leaf, shards.get(leaf.name)) for leaf in leaves}
    finder = version.finder(Seeker(rank, world_size, version.world_size))
    found = finder.find(sought)
    if left := sorted(set(filled) - found.chunks.keys()):
        why = f"{_thinned(version)}, and not" if version.record.thinned is not None else "does not hold"
        raise _Lacks(f"{why} {left[0]!r}, which a damaged newer version does", subject=f"version {version.id}")
    names = {leaf.name for leaf in leaves}
    if strict:
        _check_names(names, finder, version)
    elif version.record.thinned is not None and (missing := names - found.chunks.keys() - found.values.keys()):
        told = version.id, _thinned(version), len(missing), min(missing)
        logger.warning("version %d %s: %d names of `into` stay as they are, as %s does", *told)
    elif (asked := _nbytes(found)) < version.record.raw and rank == 0:
        what = "strict=False: `into` has no place for %d of the %d bytes that version %d holds"
        logger.warning(what, version.record.raw - asked, version.record.raw, version.id)
    in_memory: list[Request] = []
    to_cast: list[tuple[Shard, list[Chunk]]] = []
    wanted: list[Chunk] = []  # of these
    on_gpu: dict[int, list[Request]] = defaultdict(list)
    new: dict[tuple[Any, ...], Any] = {}
    for leaf in leaves:
        chunks = found.chunks.get(leaf.name)
        if leaf.name in found.values and not (leaf.is_tensor and chunks):
            value = values.loads(found.values[leaf.name].text)
            if not (isinstance(value, dict | list | tuple) and isinstance(leaf.value, type(value))):  # both are empty, then
                new[leaf.path] = value
        elif chunks and _is_replaced(leaf):
            new[leaf.path] = version.assemble(leaf.name, chunks)
        elif chunks:
            shard = _matching(leaf, shards[leaf.name] or shard_of(leaf, what="into"), version, chunks[0], cast)
            box = shard.offset, shard.extent
            if shard.dtype != chunks[0].dtype:
                to_cast.append((shard, chunks))
                wanted += [chunk for chunk in chunks if overlap(box, chunk.box) is not None]
                continue
            request = Request(leaf.name, chunks, box, shard.bits)
            (in_memory if shard.device is None else on_gpu[shard.device]).append(request)
    reader = version.reader(turn=rank / world_size)
    runs = reader.runs(in_memory)
    runs_on_gpu = {device: reader.runs(requests) for device, requests in on_gpu.items()}

    def fill(progress: Progress) -> None:
        reader.complete(runs, progress)
        for device, requests in on_gpu.items():
            fill_on_gpu(reader, device, requests, runs_on_gpu[device], progress)
        for shard, chunks in to_cast:
            _fill_and_cast(reader, shard, chunks, progress)
        replace(into, new)

    every = itertools.chain(runs, *runs_on_gpu.values(), reader.whole(wanted))
    return build(every, sources, names=frozenset(found.chunks), fill=fill)


def _is_replaced(leaf: Leaf) -> bool:
    """Whether the value is replaced in what holds it, instead of being filled."""
    return not leaf.is_tensor or isinstance(leaf.value, np.generic)


def _shard(leaf: Leaf) -> Shard | None:
    try:
        return shard_of(leaf, what="into")
    except StateError:
        return None  # said once it is clear that such a tensor was saved


def _sought(leaf: Leaf, shard: Shard | None) -> Sought:
    if shard is None:
        return Sought(tensor=leaf.is_tensor)
    return Sought(True, shard.shape, (shard.offset, shard.extent), shard.holders)


def _fill_and_cast(reader: Reader, shard: Shard, chunks: list[Chunk], progress: Progress) -> None:
    """Fill a tensor or array of another dtype than was saved, by way of host memory for one shard."""
    raw = np.empty(shard.extent, f"V{dtypes.dtype(chunks[0].dtype).itemsize}")
    reader.fill([Request(shard.leaf.name, chunks, (shard.offset, shard.extent), raw)], progress)
    try:
        if raw.size:
            _convert(raw, chunks[0].dtype, shard.local)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        what = f"{chunks[0].dtype} is not converted to {shard.dtype}: {error}"
        raise StateError(what, subject=show(shard.leaf.path, "into")) from error


def _convert(raw: Any, saved: str, target: Any) -> None:
    """Copy items that are numbers of the dtype ``saved``: by numpy's conversion into an array, by torch's into a tensor."""
    if isinstance(target, np.ndarray):
        if dtypes.of_numpy(dtypes.to_numpy(saved)) != saved:
            raise TypeError("numpy does not know it")
        np.copyto(target, raw.view(dtypes.to_numpy(saved)), casting="unsafe")
        return
    import torch

    numbers = torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(getattr(torch, saved)).reshape(raw.shape)
    target.detach().copy_(numbers)


def fill_on_gpu(reader: Reader, device: int, requests: list[Request], runs: list[Run], progress: Progress) -> None:
    """Fill tensors of a GPU by decoding there; without nvCOMP one by one through host memory. ``runs``: what the reader says must
    be fetched for the requests."""
    import torch

    try:
        from ..workers.cuda.decoding.decoder import Decoder
        from ..workers.cuda.nvcomp import version

        version()
    except (ImportError, Unsupported) as error:
        logger.warning("decoding on the CPU, at a tenth of the speed: %s", error)
        _fill_through_host(reader, requests, progress)
        return
    decoder = Decoder(torch.device("cuda", device))
    try:
        decoder.fill(reader, runs, progress)
    finally:
        decoder.close()


def _fill_through_host(reader: Reader, requests: Iterable[Request], progress: Progress) -> None:
    import torch

    for request in requests:
        words = request.target
        raw = np.empty(request.box[1], f"V{dtypes.dtype(request.chunks[0].dtype).itemsize}")
        reader.fill([dataclasses.replace(request, target=raw)], progress)
        if raw.size:
            words.copy_(torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(words.dtype).reshape(words.shape))


def restore_latest(
    repository: Repository,
    into: Any,
    agreement: Agreement,
    *,
    rank: int = 0,
    world_size: int = 1,
    strict: bool = True,
    cast: bool = False,
    progress: Progress = _silent,
) -> Version | None:
    """``restore`` from the newest version that all ranks find whole; that version, or None if there is none.

    Falls back past a damaged version, with an error in the log, to the newest one that holds all that is asked for; also with
    ``strict=False`` all tensors that the damaged version holds, which may be filled already, and would be of another version than
    the rest. ``Damaged`` if there is none.
    """
    filled = set[str]()

    @uncollected()
    def fill(version: Version) -> None:
        plan = plan_restore(
            version,
            into,
            rank=rank,
            world_size=world_size,
            strict=strict,
            cast=cast,
            sources=agreement.sources,
            filled=filled,
        )
        filled.update(plan.names)
        whose = {"version": version.id, "attempt": version.attempt, "step": version.step, "rank": rank}
        log = about(logger, repository=repository.uri, **whose)
        log.info("restoring version %d (step %d): %s", version.id, version.step, plan.summary())
        plan.execute(progress)

    newest = entry = agreement.settle(None, "")
    while entry is not None:
        damage, whole = "", True
        try:
            fill(agreement.version(entry))
        except Damaged as error:
            damage, whole = str(error), False
        except BaseException as error:
            if entry == newest or not isinstance(error, _Lacks):
                agreement.give_up(str(error))
                raise
            damage = str(error)
        answer = agreement.settle(entry, damage, whole=whole)
        if answer == entry:
            return repository.at(entry)
        entry = answer
    return None


def _matching(leaf: Leaf, shard: Shard, version: Version, saved: Chunk, cast: bool) -> Shard:
    if isinstance(shard.bits, np.ndarray) and isinstance(leaf.value, np.ndarray) and not leaf.value.flags.writeable:
        raise StateError("the array is read-only", subject=show(leaf.path, "into"))
    if overlaps(shard.local):
        raise StateError("elements share memory", subject=show(leaf.path, "into"), remedy="give it memory of its own: clone() it")
    if shard.shape != saved.shape or (shard.dtype != saved.dtype and not cast):
        raise StateError(
            f"is {shard.dtype} {shard.shape}, but version {version.id} holds {saved.dtype} {saved.shape}",
            subject=show(leaf.path, "into"),
            remedy="" if shard.shape != saved.shape else "cast=True converts",
        )
    return shard


def _check_names(wanted: set[str], finder: Finder, version: Version) -> None:
    """``StateError`` for names that only one side has. The rest of the manifest is read only if there may be others: each element
    is saved once, so a version whose bytes are all wanted holds no other tensor, but for empty ones."""
    found = finder.found
    missing = sorted(wanted - found.chunks.keys() - found.values.keys())
    saved = found.names | found.values.keys()
    if missing or _nbytes(found) != version.record.raw:
        saved = finder.names()
    unexpected = sorted(saved - wanted)
    if not (missing or unexpected):
        return
    parts = [
        f"{title}: {', '.join(names[:_LISTED])}" + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for title, names in (("in `into` but not saved", missing), ("saved but not in `into`", unexpected))
        if names
    ]
    remedy = "make them match, or pass strict=False"
    if missing and version.record.thinned is not None:
        parts.append(f"it {_thinned(version)}")
        remedy = "restore a newer version to resume, or pass strict=False for what is left of this one"
        raise _Lacks("; ".join(parts), subject=f"version {version.id}", remedy=remedy)
    raise StateError("; ".join(parts), subject=f"version {version.id}", remedy=remedy)


def _nbytes(found: Found) -> int:
    """Of all that was found, whole tensors."""
    first = [rows[0] for rows in found.chunks.values() if rows]
    return sum(math.prod(row.shape) * dtypes.dtype(row.dtype).itemsize for row in first)


def _thinned(version: Version) -> str:
    thinned = version.record.thinned
    assert thinned is not None
    when = datetime.fromtimestamp(thinned.at, timezone.utc)
    return f"was thinned at {when:%Y-%m-%d %H:%M} UTC and holds its {' and '.join(thinned.groups)} only"
