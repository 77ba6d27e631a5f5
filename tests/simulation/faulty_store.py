"""The store as one process sees it: every call takes time, during which other processes run, and may fail as in real stores.

A request travels to the store, takes effect at one moment, and the answer travels back; faults occur on both ways. Reads are
truncated or corrupted where real stores do not detect it; retries inside real stores appear as slow calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from raystow.storage.errors import Damaged, StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.object_store import Buffer, ObjectInfo, Tagged, Unfinished
from raystow.storage.stores import checks

from .fault_rates import FaultRates
from .journal import Journal
from .model_store import STALE, Held, ModelStore
from .random_source import RandomSource
from .scheduler import Process

T = TypeVar("T")
_LONG = 400.0  # seconds after which an idle connection may be closed


class FaultyStore:
    """An ``ObjectStore`` with faults. ``outage``: every call fails. ``looked``: the number of changes of the store when this
    process last read the root. ``failed_leases``: the number of leases that it could not write. ``late_deletes``: the number of
    deletions under way whose caller has given up."""

    def __init__(self, model: ModelStore, process: Process, rates: FaultRates, rng: RandomSource, journal: Journal) -> None:
        self._model, self._process, self._rates, self._rng, self._journal = model, process, rates, rng, journal
        self.outage = False
        self.looked = 0
        self.failed_leases = 0
        self.late_deletes = 0

    @property
    def uri(self) -> str:
        return "sim://run"

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self.get_tagged(key, max_bytes=max_bytes).data

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        return memoryview(self._received(key, self._call("read", key, lambda: self._find(key)).data[start : start + length]))

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        target[:] = self.get_range(key, start, target.nbytes)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        data = b"".join(parts)
        for patience in (True, True, False):  # real stores retry idempotent calls
            try:
                self._call("put", key, lambda: self._model.put(self._process.name, key, data), write=True)
                return
            except StoreUnavailable:
                if not patience or self._rng.chance(0.3):
                    self.failed_leases += key.startswith(keys.LEASES)
                    raise

    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        held = self._call("get", key, lambda: self._find(key))
        if len(held.data) > max_bytes:
            raise checks.too_large(key, len(held.data), max_bytes)
        return Tagged(self._received(key, held.data), held.tag)

    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        def swap() -> str:
            held = self._model.objects.get(key)
            if (held.tag if held else None) != tag:
                raise checks.stale(key)
            return self._model.put(self._process.name, key, data)

        return self._call("swap", key, swap, write=True)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        rates, size, shown = self._rates, self._rates.page, ""
        while True:  # page by page: a listing is not a snapshot
            lag = self._rng.between(0.0, STALE) if self._rng.chance(rates.stale) else 0.0
            found = self._call("list", prefix, lambda lag=lag: self._model.listing(prefix, lag))
            page = [info for info in found if info.key > shown][:size]
            yield from page
            if len(page) < size:
                return
            shown = page[-1].key

    def delete(self, keys: Iterable[str]) -> None:
        batch = list(keys)
        if not batch or not self._process.alive:  # the garbage collector ends the leases of a dead process at any time
            return
        done = self._rng.number(0, len(batch)) if len(batch) > 1 and self._rng.chance(self._rates.error) else len(batch)

        def forget() -> None:
            for key in batch[:done]:
                self._model.delete(self._process.name, key)

        self._call("delete", f"{batch[0]} and {len(batch) - 1} more" if batch[1:] else batch[0], forget, write=True)
        if done < len(batch):
            raise self._failed(batch[done], "some objects could not be deleted")

    def unfinished(self) -> Iterator[Unfinished]:
        yield from self._call("unfinished", "", lambda: list(self._model.unfinished.values()))

    def abort(self, unfinished: Iterable[Unfinished]) -> None:
        batch = list(unfinished)

        def drop() -> None:
            for write in batch:
                self._model.unfinished.pop(write.token, None)

        if batch:
            self._call("abort", batch[0].key, drop)

    def _call(self, name: str, key: str, effect: Callable[[], T], *, write: bool = False) -> T:
        """Send one request; its effect, if any, takes place at one moment."""
        rates, rng = self._rates, self._rng
        upload = self._begun(key) if name == "put" else ""
        self._travel(0.02)
        if rng.chance(rates.slow_down):
            self._travel(rng.choice([1.0, 4.0, 30.0]))
        if self.outage or rng.chance(rates.error):
            self._model.unfinished.pop(upload, None)
            raise self._failed(key, rng.choice(["500", "503 SlowDown"]))
        if write and rng.chance(rates.late):
            self.late_deletes += name == "delete"
            self._process.scheduler.after(rng.around(40.0), lambda: self._late(name, key, effect, upload))
            self._travel(30.0)
            raise self._failed(key, "no answer; it is still on its way")
        if upload and self._model.unfinished.pop(upload, None) is None:
            raise self._failed(key, "somebody has aborted this upload")
        try:
            result = effect()
            self._note(name, key, "")
        except Exception as error:
            self._note(name, key, type(error).__name__)
            self._travel(0.02)
            raise
        cut_off = name == "swap" and rng.chance(rates.cut_off)
        stalls_late = cut_off and rng.chance(0.5)  # the process stalls after the call failed, or while it waits
        if cut_off and not stalls_late:
            self._freeze()
        sent = self._process.scheduler.time
        self._travel(0.02)
        if stalls_late:
            self._freeze()
        broken = stalls_late or (self._process.scheduler.time > sent + _LONG and rng.chance(0.5))
        if name == "swap" and rng.chance(rates.own_refused):
            self._note(name, key, "done, and refused as already done")
            raise checks.stale(key)
        if broken or rng.chance(rates.lost_answer):
            raise self._failed(key, "the answer was lost")
        return result

    def _late(self, name: str, key: str, effect: Callable[[], object], upload: str) -> None:
        """Execute a request whose sender has given up."""
        self.late_deletes -= name == "delete"
        if upload and self._model.unfinished.pop(upload, None) is None:
            return
        try:
            effect()
            self._note(f"late {name}", key, "")
        except (StoreUnavailable, checks.PreconditionFailed):
            self._note(f"late {name}", key, "refused")

    def _begun(self, key: str) -> str:
        token = self._rng.token()
        self._model.unfinished[token] = Unfinished(key, token, self._model.now)
        return token

    def _travel(self, typical: float) -> None:
        """Let time pass for a message; other processes run, and this process may die or freeze."""
        rates, rng = self._rates, self._rng
        if rng.chance(rates.deaths):
            self._journal.note(self._process.scheduler.time, self._process.name, "dies")
            self._process.kill()
        if rng.chance(rates.freezes):
            self._freeze()
        slow = rng.between(30.0, 300.0) if rng.chance(rates.slow) else 0.0
        self._process.scheduler.pause(rng.around(typical) + slow)

    def _freeze(self) -> None:
        seconds = self._rng.choice([0.02, 0.2, 1.0]) * max(600.0, self._rates.longest_freeze)
        self._journal.note(self._process.scheduler.time, self._process.name, f"freezes for {seconds:.0f} s")
        self._process.freeze(seconds)

    def _find(self, key: str) -> Held:
        if key == keys.ROOT:
            self.looked = self._model.changes
        held = self._model.objects.get(key)
        if held is None:
            raise checks.missing(key)
        return held

    def _received(self, key: str, data: bytes) -> bytes:
        """Return the data of an object as received: sometimes truncated, or with a flipped bit."""
        if not data or not self._rng.chance(self._rates.corrupted):
            return data
        if self._rng.chance(0.5):
            raise Damaged("the body was cut", subject=key) if key != keys.ROOT else self._failed(key, "the body was cut")
        at = self._rng.number(0, len(data) - 1)
        self._note("get", key, "corrupted")
        return data[:at] + bytes([data[at] ^ (1 << self._rng.number(0, 7))]) + data[at + 1 :]

    def _failed(self, key: str, what: str) -> StoreUnavailable:
        self._note("fault", key, what)
        return StoreUnavailable(what, subject=key)

    def _note(self, name: str, key: str, outcome: str) -> None:
        self._journal.note(self._process.scheduler.time, self._process.name, f"{name} {key}{': ' if outcome else ''}{outcome}")
