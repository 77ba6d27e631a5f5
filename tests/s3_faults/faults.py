"""The faults of requests to an S3 server, and the rules that select the requests."""

from __future__ import annotations

import enum
import re
import threading
from dataclasses import dataclass, field


class Fault(enum.Enum):
    """A fault of a request."""

    SLOW_DOWN = "answered with 503 SlowDown; the server never sees it"
    RESET_REQUEST = "the connection breaks in the middle of the request's body"
    RESET_ANSWER = "the connection breaks in the middle of the answer's body"
    LOSE_ANSWER = "the server does it, the connection breaks before the answer"
    STALL_REQUEST = "nobody reads the request's body, nobody answers"
    STALL_ANSWER = "the answer stops in the middle of its body"
    CORRUPT_REQUEST = "a byte of the request's body arrives changed"
    CORRUPT_ANSWER = "a byte of the answer's body arrives changed"
    DELAY = "the answer comes later"


@dataclass
class Rule:
    """A fault for the next ``times`` requests whose method and path (with its query) match, after ``skip`` requests that pass.

    ``at``: the byte of the body at which the fault happens. ``seconds``: the delay of a delayed answer.
    """

    fault: Fault
    method: str
    path: re.Pattern[str]
    times: int
    skip: int
    at: int
    seconds: float
    hits: int = 0
    struck: threading.Event = field(default_factory=threading.Event)

    def takes(self, method: str, path: str) -> bool:
        """Return whether the rule applies to this request, and count the request."""
        if self.hits >= self.times or not re.fullmatch(self.method, method) or not self.path.search(path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.hits += 1
        self.struck.set()
        return True
