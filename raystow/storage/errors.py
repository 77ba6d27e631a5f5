"""Every error that raystow raises. Classes differ in what a caller does.

    RaystowError
    ├── StateError             the state, ``into`` or an argument is invalid: change it
    ├── StoreError             the object store failed or refused
    │   ├── CredentialsRefused the store does not accept the credentials, or no longer: renew them
    │   ├── PreconditionFailed a conditional write lost: read again
    │   ├── StoreUnavailable   time-out, throttling, broken connection: try again later
    │   │   └── StoreFull      there is no space, or a quota is used up: free some
    │   └── UnsafeStore        the store cannot keep commits atomic: use another
    ├── NotFound               there is no such version, tensor or object
    ├── NotARepository         there is no repository under this URI
    ├── Damaged                stored bytes are not what was written: use another version
    ├── Untrusted              a required signature is missing: find out who wrote the version, or fix the keys
    ├── Unsupported            written by a newer raystow
    │   └── MissingDependency  an optional library is not installed: install it; also an ImportError
    ├── Fenced                 another run writes to the repository: stop one of the two
    ├── InvariantError         a change of the root would break one of its invariants, and was not made: plan again
    ├── SaveFailed             this attempt becomes no version; training and later saves go on
    │   └── ReplicasDiffer     ranks hold other bits of the same tensor: drain a node, or restore
    ├── OutcomeUnknown         a save may or may not have become a version: call ``result()`` again, or list the versions
    ├── DeadlineExceeded       the wait ended before the operation did; also a TimeoutError
    └── ClusterError           Ray, a node worker or the coordinator cannot be reached
        ├── RankRestarted      a rank or the coordinator was replaced: ranks begin the restore or replay again by themselves
        ├── SettingsMissing    an actor does not know how to reach the store: its callers tell it by themselves
        └── ProtocolError      two processes do not speak the same protocol: restart what runs another version of raystow

An error says what happened, to which object, and what to do. All of them survive pickling (Ray sends them between processes).
"""

from __future__ import annotations


class RaystowError(Exception):
    """Base of the tree. ``subject`` names the object concerned (a key, a tensor, a rank); ``remedy`` says what to do."""

    def __init__(self, what: str, *, subject: str = "", remedy: str = "") -> None:
        self.what, self.subject, self.remedy = what, subject, remedy
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.subject}: {self.what}" if self.subject else self.what
        return f"{text} ({self.remedy})" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.subject, self.remedy)


def _rebuild(kind: type[RaystowError], what: str, subject: str, remedy: str) -> RaystowError:
    return kind(what, subject=subject, remedy=remedy)


class StateError(RaystowError):
    """The state, ``into`` or an argument is invalid."""


class StoreError(RaystowError):
    """The object store refused or failed an operation."""


class CredentialsRefused(StoreError):
    """The store does not accept the credentials of a request, which had no effect."""


class PreconditionFailed(StoreError):
    """A conditional write found another content than the caller expected."""


class StoreUnavailable(StoreError):
    """The store did not answer in time or could not do its work now."""


class StoreFull(StoreUnavailable):
    """The store has no space left, or the quota is used up."""


class UnsafeStore(StoreError):
    """The store does not give what an atomic commit needs."""


class NotFound(RaystowError):
    """A version, a tensor or an object does not exist."""


class NotARepository(RaystowError):
    """There is no repository at this URI."""


class Damaged(RaystowError):
    """An object is missing, cut, or differs from what was written."""


class Untrusted(RaystowError):
    """A signature by a trusted key is asked for, and there is none."""


class Unsupported(RaystowError):
    """The format, a codec or a transform is not known here."""


class MissingDependency(Unsupported, ImportError):
    """An optional library is not installed; the remedy names the extra that installs it."""


class Fenced(RaystowError):
    """Another run has taken over the repository; this one must not write."""


class InvariantError(RaystowError):
    """A change of the root would break an invariant; nothing was written. The message begins with its number and name."""


class SaveFailed(RaystowError):
    """An attempt to make a version was given up; nothing of it is visible."""


class ReplicasDiffer(SaveFailed):
    """Ranks hold other bits of the same tensor, and no version is made of these."""


class OutcomeUnknown(RaystowError):
    """A save has ended without an answer: it may or may not have become a version."""


class DeadlineExceeded(RaystowError, TimeoutError):
    """The time the caller was willing to wait is over; what it waited for may still come."""


class ClusterError(RaystowError):
    """A part of the Ray cluster that raystow needs cannot be reached."""


class RankRestarted(ClusterError):
    """Another process has taken a rank while all ranks restored together, or the coordinator was restarted during a replay."""


class SettingsMissing(ClusterError):
    """This process has no settings for a store, or was restarted since it received them: the caller sends them and asks again."""


class ProtocolError(ClusterError):
    """A message is invalid, or another process speaks another version of the protocol."""
