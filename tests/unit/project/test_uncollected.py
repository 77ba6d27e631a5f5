"""The garbage collector is enabled again when all pauses have ended, in any order."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import ItemsView

import numpy as np
import pytest
from helpers.local_cluster import LocalCluster

import raystow
from raystow.state.planner import plan_save
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.runtime.gc_pause import uncollected


def test_the_collector_is_enabled_again_after_an_error() -> None:
    assert gc.isenabled()
    with uncollected(), uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="within"), uncollected():
        raise RuntimeError("within")
    assert gc.isenabled()


def test_overlapping_pauses_enable_the_collector_at_the_end() -> None:
    one, other = uncollected(), uncollected()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_pause_that_ends_while_another_begins_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, is_enabled = uncollected(), uncollected(), gc.isenabled
    ending = threading.Thread(target=one.__exit__, args=(None, None, None))

    def end_between() -> bool:
        enabled = is_enabled()
        ending.start()
        ending.join(0.2)  # it must wait for the other one to have begun
        return enabled

    one.__enter__()
    monkeypatch.setattr(gc, "isenabled", end_between)
    other.__enter__()
    ending.join()
    other.__exit__(None, None, None)
    assert is_enabled()


def test_a_collector_that_was_disabled_stays_disabled() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_frozen_objects_are_not_tracked() -> None:
    script = """
import gc
from raystow.storage.runtime.gc_pause import freeze
there, loop = len(gc.get_objects()), []
loop.append(loop)
del loop
freeze()
assert gc.get_freeze_count() > there // 2
assert len(gc.get_objects()) < there // 100
assert not gc.garbage
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_collector_is_paused_while_a_save_is_planned() -> None:
    seen = list[bool]()

    class Noting(dict[str, object]):
        def items(self) -> ItemsView[str, object]:
            seen.append(gc.isenabled())
            return super().items()

    plan_save({"model": Noting(w=np.ones(3))}, rank=0, world_size=1)
    assert not any(seen)
    assert seen
    assert gc.isenabled()


def test_the_collector_is_paused_during_a_restore() -> None:
    seen = list[bool]()
    with LocalCluster(f"memory://uncollected-{SYSTEM.token()}") as cluster:
        version = cluster.save({"w": np.ones(3)}, step=1)
        raystow.restore(version, {"w": np.zeros(3)}, progress=lambda nbytes: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()
