"""Settings that change while a job runs."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from raystow.orchestrator.client.settings_renewal import SettingsRenewal
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.settings import StoreSettings

HOUR = 3600.0


class Provider:
    """Settings, and what was sent."""

    def __init__(self, expires: float) -> None:
        self.now, self.asked = StoreSettings("place", credentials={"key": "first"}, expires=expires), False
        self.sent = queue.SimpleQueue[StoreSettings]()

    def __call__(self, anew: bool) -> StoreSettings:
        self.asked |= anew
        return self.now

    def renew(self) -> None:
        self.now = StoreSettings("place", credentials={"key": "second"}, expires=SYSTEM.now() + HOUR)


@pytest.fixture
def provider(request: pytest.FixtureRequest) -> Iterator[Provider]:
    provider = Provider(request.param)
    renewal = SettingsRenewal(provider, provider.now, provider.sent.put, pauses=(0.01, 60.0))
    provider.ask = renewal.ask  # type: ignore[attr-defined]
    yield provider
    renewal.close()


@pytest.mark.parametrize("provider", [1.0], indirect=True)  # they have ended
def test_changed_settings_are_sent(provider: Provider) -> None:
    provider.renew()
    assert provider.sent.get(timeout=60) == provider.now
    assert not provider.asked


@pytest.mark.parametrize("provider", [0.0], indirect=True)  # they do not end: the next look is in a minute
def test_settings_are_sent_when_an_actor_asks(provider: Provider) -> None:
    """Also the same ones again: then the actor does not wait for others."""
    provider.ask()  # type: ignore[attr-defined]
    assert provider.sent.get(timeout=30) == provider.now
    assert provider.asked
    provider.renew()
    provider.ask()  # type: ignore[attr-defined]
    assert provider.sent.get(timeout=30) == provider.now
