"""How long the requests to an object store in a cloud may take, and the sizes of the large ones."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_MIB = 1 << 20
_NO_LIMIT = 1 << 20


@dataclass(frozen=True)
class RequestLimits:
    """Time-outs in seconds, numbers of attempts, and sizes in bytes.

    Every call ends. A request of boto3 ends after ``attempts`` times ``connect_seconds`` + ``request_seconds`` and the pauses
    between, and an attempt ends sooner if no byte comes for ``stall_seconds``. A request of obstore (a part, a range) ends after
    ``retry_seconds`` + ``request_seconds``: it is retried until ``retry_seconds`` are over. ``request_seconds`` is below
    ``retry_seconds``, so that a stalled request gets a second try. After ``silent_attempts`` without an answer there is none.

    A read through obstore without an answer for ``suspect_seconds`` is sent through boto3 instead when the process has grown by
    ``suspect_bytes`` meanwhile: boto3's answers are bounded here, and obstore reads the bodies of errors to their end.
    """

    connect_seconds: float = 5.0
    stall_seconds: float = 30.0
    request_seconds: float = 90.0
    attempts: int = 5
    silent_attempts: int = 5
    retry_seconds: float = 120.0
    single_put_bytes: int = 16 * _MIB
    part_bytes: int = 16 * _MIB
    concurrency: int = 8
    stream_bytes: int = 64 * _MIB
    connections: int = 32
    suspect_seconds: float = 1.0
    suspect_bytes: int = 256 * _MIB

    @property
    def silent_seconds(self) -> float:
        """The seconds after which no request is sent again to a server that cannot be connected to."""
        return (self.silent_attempts - 1) * self.stall_seconds

    @property
    def unanswered_seconds(self) -> float:
        """How long a request takes that is never answered, all attempts included."""
        return self.silent_attempts * (self.connect_seconds + self.stall_seconds)

    @property
    def unanswered_upload_seconds(self) -> float:
        """The same for an upload."""
        return self.silent_attempts * self.request_seconds

    @property
    def retries(self) -> RetryConfig:
        """The ``retry_config`` of obstore for parts of an upload that is repeated: by time and not by number, since a server that
        is busy is so for a while, and answers at once."""
        return {"max_retries": _NO_LIMIT, "retry_timeout": timedelta(seconds=self.retry_seconds)}

    @property
    def upload_timeouts(self) -> ClientConfig:
        """The ``client_options`` of obstore for uploads, without a stall limit: obstore's runs from the start of a request to the
        first byte of its answer, the time to send the body included, and would fail every upload over a slow line."""
        return {"connect_timeout": timedelta(seconds=self.connect_seconds), "timeout": timedelta(seconds=self.request_seconds)}

    @property
    def read_timeouts(self) -> ClientConfig:
        """The same for reads and small requests."""
        return {**self.upload_timeouts, "read_timeout": timedelta(seconds=self.stall_seconds)}


DEFAULT_LIMITS = RequestLimits()
"""For trainings, which outlast a store that does not answer for some minutes."""

COMMAND_LIMITS = RequestLimits(silent_attempts=2)
"""For commands, whose users wait."""

_of_process = DEFAULT_LIMITS


def of_process() -> RequestLimits:
    """Return the limits of stores that are opened without any."""
    return _of_process


def use(limits: RequestLimits) -> None:
    """Let stores of this process that are opened from now on have these limits."""
    global _of_process
    _of_process = limits


ONCE: RetryConfig = {"max_retries": 0}
"""The ``retry_config`` of all other clients of obstore."""
