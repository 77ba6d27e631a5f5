"""A training process on its own Ray cluster, whose S3 server has faults. It prints the outcomes of its saves as JSON.

python on_ray.py s3://bucket/prefix        # with AWS_ENDPOINT_URL and credentials in the environment
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

import ray
import torch
from s3_faults.faults import Fault
from s3_faults.proxy import FaultProxy
from s3_faults.sample_state import check, two_group_state

import raystow
from raystow.storage.runtime.clock import SYSTEM

PACK = ("PUT|POST", r"versions/.*\.pack")
TIMEOUT = 4.0
FOR_EVER = 10_000


def run(uri: str, proxy: FaultProxy) -> dict[str, Any]:
    found: dict[str, Any] = {}
    checkpointer = raystow.Checkpointer(uri, rank=0, world_size=1, timeout=TIMEOUT, on_failure=3)

    def failing(saver: raystow.Checkpointer, step: int) -> dict[str, Any]:
        begun = SYSTEM.monotonic()
        pending = saver.save(two_group_state(step), step=step)
        try:
            pending.result(60)
        except raystow.SaveFailed as error:
            counts = [saver.failures.total, saver.failures.in_a_row]
            return {"error": str(error), "seconds": SYSTEM.monotonic() - begun, "failures": counts}
        raise AssertionError(f"the save of step {step} did not fail")

    def saving(step: int) -> list[int]:
        version = checkpointer.save(two_group_state(step), step=step).result(60)
        check(version, step)
        return [version.id, checkpointer.failures.total, checkpointer.failures.in_a_row]

    saving(1)  # all processes have started, so later durations are those of the store
    proxy.inject(Fault.SLOW_DOWN, *PACK)
    proxy.inject(Fault.LOSE_ANSWER, "PUT", r"/root\.json")
    found["troubled"] = saving(2)
    proxy.inject(Fault.STALL_REQUEST, *PACK, times=FOR_EVER)
    found["stalled"] = failing(checkpointer, 3)
    proxy.heal()
    found["after"] = saving(4)
    proxy.inject(Fault.SLOW_DOWN, *PACK, times=FOR_EVER)
    found["refused"] = [failing(checkpointer, step) for step in (5, 6, 7)]
    try:
        checkpointer.save(two_group_state(8), step=8)
    except raystow.SaveFailed as error:
        found["too many"] = str(error)
    proxy.heal()
    found["recovered"] = saving(9)

    proxy.inject(Fault.STALL_REQUEST, *PACK, times=FOR_EVER)
    begun = SYSTEM.monotonic()
    checkpointer.save(two_group_state(10), step=10)
    checkpointer.fence()
    try:
        checkpointer.close()
    except raystow.SaveFailed as error:
        found["last"] = str(error)
    found["closed after"] = SYSTEM.monotonic() - begun

    with raystow.Checkpointer(uri, rank=0, world_size=1, timeout=TIMEOUT, on_failure="raise") as strict:
        found["strict"] = failing(strict, 11)
        try:
            strict.fence()
        except raystow.SaveFailed as error:
            found["raised"] = str(error)
        proxy.heal()
        for what, allow in (("durable", False), ("newest", True)):
            into = two_group_state(0)
            version = strict.restore_latest(into=into, allow_uncommitted=allow)
            assert version is not None
            found[what] = [version.step, torch.equal(into["model"]["w"], two_group_state(version.step)["model"]["w"])]
    found["steps"] = [version.step for version in raystow.open(uri).versions()]
    return found


def main() -> None:
    server = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    with FaultProxy(server.hostname or "", server.port or 80) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        print(json.dumps(run(sys.argv[1], proxy)))
        ray.shutdown()


if __name__ == "__main__":
    main()
