"""Run targets on files and say what each took: ``python tests/fuzz/bounded.py TARGET FILE TARGET FILE ...``.

One line of JSON for each: seconds of processor time, and the bytes by which memory grew at its peak. The address space is
bounded as well: what asks for too much at once fails here, though nobody would have touched it.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.seeds import seeds
from fuzz.targets import TARGETS, allowed

SPACE = 3 << 30


def status(field: str) -> int:
    """A line of the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def processor() -> float:
    """Seconds of processor time so far: other processes of a busy machine do not count."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> None:
    for name, target in TARGETS.items():
        allowed(lambda name=name, target=target: target(seeds()[name][0]))  # imports, compiled code
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + SPACE, resource.RLIM_INFINITY))
    for name, file in zip(arguments[::2], arguments[1::2], strict=True):
        data = Path(file).read_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, begin = status("VmRSS"), processor()
        whole = allowed(lambda name=name, data=data: TARGETS[name](data))
        took = {"file": file, "whole": whole, "seconds": processor() - begin, "bytes": status("VmHWM") - before}
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
