"""The lock on a file is not inherited by forked processes."""

from __future__ import annotations

import os
from pathlib import Path

from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.file_lock import exclusive


def test_a_fork_under_the_lock_does_not_keep_it(tmp_path: Path) -> None:
    """A data loader forks its workers while another thread commits."""
    path = tmp_path / "lock"
    released, release = os.pipe()
    with exclusive(path, timeout=0.0, clock=SYSTEM):
        child = os.fork()
        if not child:
            code = 1
            try:
                inherited = any(one.exists() and one.samefile(path) for one in Path("/proc/self/fd").iterdir())
                os.read(released, 1)
                with exclusive(path, timeout=0.0, clock=SYSTEM):
                    code = 2 if inherited else 0
            finally:
                os._exit(code)
    try:
        with exclusive(path, timeout=0.0, clock=SYSTEM):
            pass
    finally:
        os.write(release, b".")
        status = os.waitpid(child, 0)[1]
        os.close(release)
        os.close(released)
    assert os.waitstatus_to_exitcode(status) == 0
