# ruff: noqa: F403, F405
"""Every message between processes of raystow: frozen ``msgspec`` classes.

Three channels carry them: the Unix socket between a process and the worker of its node, TCP between node workers, and calls of
Ray actors. ``PROTOCOL`` names the version of all of them. Both ends of a channel compare it before the first message.
"""

from __future__ import annotations

from ....storage.errors import ProtocolError
from ....storage.limits import MAX_NAME
from ..codec import CoordinatorRequest as CoordinatorRequest
from ..codec import Message as Message
from ..codec import answers_of as answers_of
from ..codec import decode as decode
from ..codec import encode as encode
from .coordinator import *
from .devices import *
from .journal import *
from .reads import *
from .replicas import *
from .restores import *
from .staging import *
from .status import *

STAGING = (
    *(BeginSave, StageRaw, StageDerived, ComparedChunks, ChunkDigests, CodedLayout, StageCoded, StageOnDevice),
    *(SlotsFilled, FlushPacks, AbortSave, DescribeReplicas, EndSave),
    *(OpenDevice, CheckDevice, LendSlots),
)
"""What a training process sends after ``OpenSession``."""

STAGING_ANSWERS = (
    *(SlotsFree, AttemptJoined, SaveStaged, SaveDone, SaveLost, SaveWarning, BaseDigests),
    *(DeviceOpened, Acknowledged, DeviceReady, DeviceRefused),
)
"""What a node worker sends to a training process after ``SessionOpened``."""

COORDINATOR_REQUESTS = tuple(CoordinatorRequest.__subclasses__())
"""What ranks and node workers ask the coordinator."""

MESSAGES = (*(message for message in Message.__subclasses__() if message is not CoordinatorRequest), *COORDINATOR_REQUESTS)
"""All messages."""

PROTOCOL = "2.bf7a2794e1021264"
"""Version of the protocol that this process speaks: a number, and ``fingerprint(MESSAGES)``, which a test compares. To compute it
takes a seventh of an import.
"""

GREETING = PROTOCOL.encode().ljust(32, b"\0")
"""What both ends of a socket send first."""


def shortened(text: str) -> str:
    """Return what of an error's text fits into a message."""
    return text[:MAX_NAME]


def check_greeting(theirs: bytes, who: str) -> None:
    """Raise ``ProtocolError`` unless a peer's greeting names the protocol that this process speaks."""
    check_protocol(theirs.rstrip(b"\0").decode("ascii", "replace"), who)


def check_protocol(theirs: str, who: str) -> None:
    """Raise ``ProtocolError`` unless ``theirs`` is the protocol that this process speaks."""
    if theirs != PROTOCOL:
        what = f"speaks protocol {theirs or 'unknown'}, this process speaks {PROTOCOL}"
        raise ProtocolError(what, subject=who, remedy="restart all processes with one version of raystow")
