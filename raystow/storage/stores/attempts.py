"""Repeats what obstore failed to do, unless the failure is final.

obstore repeats each server error by itself, also 501 and 507, which no repetition changes. So its clients send each request once,
except those that repeat an upload in parts: there a failed part alone is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from obstore.exceptions import BaseError

from ..runtime.clock import SYSTEM
from ..runtime.metrics import RETRIES, record
from .request_limits import RequestLimits
from .store_answers import StoreAnswers

FAILURES = (BaseError, OSError)
"""What obstore raises."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0  # seconds, as obstore's

_Result = TypeVar("_Result")


class Attempts:
    """The attempts of one operation of the store at ``uri``."""

    def __init__(self, answers: StoreAnswers, limits: RequestLimits, uri: str) -> None:
        self._answers, self._limits, self._uri = answers, limits, uri
        self._begun, self._pause = SYSTEM.monotonic(), _FIRST_PAUSE
        self._silent = 0

    def after(self, error: BaseException) -> None:
        """Wait until the next attempt. Raises ``error`` if it is final, or the time is over."""
        took = SYSTEM.monotonic() - self._begun
        silent = self._answers.is_silence(error)
        self._silent += silent
        if not self._answers.is_passing(error) or took > self._limits.retry_seconds:
            raise error
        if silent and self._silent >= self._limits.silent_attempts and took >= self._limits.silent_seconds:
            raise error
        record(RETRIES, repository=self._uri)
        SYSTEM.sleep(self._pause * int(SYSTEM.token()[:8], 16) / (1 << 32))  # those who failed together do not return together
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def result_of(self, send: Callable[[], _Result]) -> _Result:
        """Return the result of ``send``, which is called until it succeeds. Raises its last error."""
        while True:
            try:
                return send()
            except FAILURES as error:
                self.after(error)
