"""Run targets on files and report the resources of each: ``python tests/fuzz/bounded.py TARGET FILE TARGET FILE ...``.

It prints one line of JSON per file: seconds of processor time, and the growth of peak memory in bytes. The address space is
limited as well, so an excessive allocation fails even if its memory is never used.
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
    """Return a field of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def processor() -> float:
    """Return the processor time of this process in seconds, which a busy machine does not distort."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> None:
    for name, target in TARGETS.items():
        allowed(lambda name=name, target=target: target(seeds()[name][0]))  # imports and compiles
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + SPACE, resource.RLIM_INFINITY))
    for name, file in zip(arguments[::2], arguments[1::2], strict=True):
        data = Path(file).read_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, begin = status("VmRSS"), processor()
        whole = allowed(lambda name=name, data=data: TARGETS[name](data))
        took = {"file": file, "whole": whole, "seconds": processor() - begin, "bytes": status("VmHWM") - before}
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
