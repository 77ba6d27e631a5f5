"""How a job reaches a store: what its address leaves open, and the credentials.

A node worker or a coordinator opens each store with the settings of the job that uses it, never with those of its own
environment, which is that of the job that made the actor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

import msgspec

from ..coding.digest import stored_digest
from ..errors import ClusterError, SettingsMissing
from ..limits import MAX_NAME
from ..object_store import ObjectStore

RENEWAL = 60.0
"""Seconds within which a job must send other settings when a store has refused its credentials."""

MAX_SETTING = 1 << 16
"""Characters of one value."""

Settings = Annotated[
    Mapping[Annotated[str, msgspec.Meta(max_length=MAX_NAME)], Annotated[str, msgspec.Meta(max_length=MAX_SETTING)]],
    msgspec.Meta(max_length=64),
]
"""Values by name."""


@dataclass(frozen=True)
class StoreSettings:
    """What opens a store, apart from its address. Only ``place`` is ever shown.

    Attributes:
        place: A digest of the endpoint or account: equal addresses with another one are other stores. Empty for a local folder.
        client: The endpoint, the region and the like.
        credentials: Secret.
        expires: When the credentials end, in seconds since 1970; 0 if they do not.
    """

    place: str = ""
    client: Settings = field(default_factory=dict, repr=False)
    credentials: Settings = field(default_factory=dict, repr=False)
    expires: float = 0.0


LOCAL = StoreSettings()
"""Those of a folder, which needs none."""


@dataclass(frozen=True)
class S3Overrides:
    """What a caller says about an S3 server in place of the AWS configuration, which says what is empty here.

    Attributes:
        endpoint: The URL of the server.
        region: The region of the bucket.
        virtual: Whether the bucket is a part of the host name.
        certificates: A file of certificates that the server's one is checked with.
        credentials: As those of ``StoreSettings``.
    """

    endpoint: str = ""
    region: str = ""
    virtual: bool = False
    certificates: str = ""
    credentials: Settings = field(default_factory=dict, repr=False)


class StoreAddress(NamedTuple):
    """Identifies a store among those of all jobs: its address, and the ``place`` of its settings."""

    uri: str
    place: str = ""


@runtime_checkable
class Configured(Protocol):
    """A store that has settings."""

    def place(self) -> str:
        """Return the place of the settings. Raises ``StoreError`` if the configuration is incomplete."""

    def settings(self, *, anew: bool = False) -> StoreSettings:
        """Return the settings with credentials that are valid now. ``anew``: the last ones were refused, so that what provides
        them is asked again. Raises ``StoreError`` if there are none."""


def settings_of(store: ObjectStore, *, anew: bool = False) -> StoreSettings:
    """Return the settings of a store; see ``Configured.settings``."""
    return store.settings(anew=anew) if isinstance(store, Configured) else LOCAL


def place_of(store: ObjectStore) -> str:
    """Return the place of a store; raises as ``Configured.place``."""
    return store.place() if isinstance(store, Configured) else ""


def place_named(*parts: str | None) -> str:
    """Return the place that these values identify."""
    return stored_digest("\n".join(part or "" for part in parts).encode()).hex()[:12]


class JobSettings:
    """The newest settings that jobs have sent for one store. Thread-safe. An address without a place has none: it is a folder, or
    this process serves one job alone, with its own environment.

    Args:
        address: Of the store.
        ask: Lets processes of the job send the settings that they have now, and returns how many do so.
        patience: Seconds to wait for them.
    """

    def __init__(self, address: StoreAddress, ask: Callable[[], int] = lambda: 0, *, patience: float = RENEWAL) -> None:
        self._patience = patience
        self.address, self.ask = address, ask
        self._newest = None if address.place else LOCAL
        self._refused: StoreSettings | None = None
        self._sent, self._changed = 0, threading.Condition()

    @property
    def given(self) -> JobSettings | None:
        """What ``open_store`` opens the store with."""
        return self if self.address.place else None

    def use(self, settings: StoreSettings) -> None:
        """Use these from now on, unless the store has refused them. Raises ``ClusterError`` for those of another store."""
        if settings.place != self.address.place:
            what, remedy = "these settings are those of another store", "use one endpoint and account for all processes of a job"
            raise ClusterError(what, subject=self.address.uri, remedy=remedy)
        with self._changed:
            if settings != self._newest and (settings != self._refused or self._newest is None):
                self._newest = settings
            self._sent += 1
            self._changed.notify_all()

    def renewed(self, refused: StoreSettings) -> bool:
        """Return whether there are others than these, whose credentials the store has refused. Asks the job for some, and waits
        until they come, or until all that were asked have sent the same."""
        with self._changed:
            if self._newest is not refused:
                return True
            self._refused, before = refused, self._sent
        asked = self.ask()
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not refused or self._sent >= before + asked, self._patience)
            return self._newest is not refused

    def __call__(self) -> StoreSettings:
        """Return the newest ones. Raises ``SettingsMissing`` if there are none yet."""
        with self._changed:
            if self._newest is None:
                raise SettingsMissing("this process does not know how to reach the store", subject=self.address.uri)
            return self._newest
