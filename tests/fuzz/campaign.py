"""Fuzz one target with atheris, guided by the coverage of the parser: ``python tests/fuzz/campaign.py TARGET SECONDS``.

Inputs that reach new code are kept in ``.fuzz/TARGET``; the next run starts from them. An input that makes the target fail,
crash, or take more than 2 GiB or 10 seconds is kept as ``.fuzz/TARGET-error-...`` or a similar name, and the exit code is not 0.
Pass that file instead of the seconds to run the target on it once.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["raystow.storage", "json"]):
    from fuzz.seeds import seeds
    from fuzz.targets import TARGETS, allowed

    from raystow.storage.coding.digest import stored_digest


def main(name: str, how: str) -> None:
    """Run for a number of seconds, or on one file."""
    target, folder = TARGETS[name], Path(".fuzz") / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()[name]):
        (folder / f"seed-{number}").write_bytes(seed)
    work = [str(folder), f"-max_total_time={how}"] if how.isdigit() else [how]

    def once(data: bytes) -> None:
        try:
            allowed(lambda: target(data))
        except BaseException:  # written here because atheris does not write it after some errors of C++ libraries
            kept = Path(f".fuzz/{name}-error-{stored_digest(data).hex()[:16]}")
            kept.write_bytes(data)
            traceback.print_exc()
            print(f"kept in {kept}", file=sys.stderr, flush=True)
            os._exit(1)

    limits = ["-rss_limit_mb=2048", "-timeout=10", "-max_len=65536", f"-artifact_prefix=.fuzz/{name}-"]
    atheris.Setup([sys.argv[0], *work, *limits, "-print_final_stats=1"], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
