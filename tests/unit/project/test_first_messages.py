"""The first messages of a process, which its threads may decode at the same time: eight ranks connect to a new node worker."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from raystow.workers.protocol import codec
from raystow.workers.protocol.messages import STAGING, BeginSave, Incarnation, SaveContents, RankSaveRequest

sys.setswitchinterval(1e-6)
process = Incarnation("repository", 1, 1, "process", "job 1")
message = BeginSave(RankSaveRequest(0, 1, process, 1, 1, 600.0), SaveContents(0, 0), ())
data, together = codec.encode(message), Barrier(8)


def decode(_):
    together.wait(30)
    return all(codec.decode(data, *STAGING) == message for _ in range(100))


with ThreadPoolExecutor(8) as threads:
    assert all(threads.map(decode, range(8)))
"""


def test_threads_decode_their_first_messages_together() -> None:
    """While msgspec read the types of a class in one thread, another that decoded such a message died of a segmentation fault: in
    most of these processes."""
    for _ in range(6):  # one after the other: threads of a process must run at the same time
        subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
