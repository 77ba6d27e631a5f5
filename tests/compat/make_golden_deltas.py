"""Script that wrote ``golden-deltas/``, a repository with deltas to earlier versions. The tests do not run it.

    cd tests && python compat/make_golden_deltas.py compat/golden-deltas-new

Version 1 is whole, version 2 a delta to version 1, version 3 a delta to version 2. One tensor of each word width changes by small
amounts. ``weights`` is derived from ``master``. ``few`` is too small for a delta.
"""

import json
import sys
from pathlib import Path

import numpy as np
from blake3 import blake3
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.builders import rows_and_pack, whole, write_rows

from raystow.storage.coding.derived import Derivation, derive
from raystow.storage.coding.digest import raw_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.repository import create_repository

RANDOM = np.random.default_rng(8)


def moved(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    after = {}
    for name, array in state.items():
        words = array.view(f"u{array.itemsize}")
        by = RANDOM.choice(4, words.shape, p=[0.85, 0.05, 0.05, 0.05]).astype(words.dtype) - words.dtype.type(1)
        after[name] = (words + by).view(array.dtype)
    return after


def main(folder: str) -> None:
    master = np.resize(RANDOM.normal(0, 0.02, 997).astype(np.float32), (120, 70))
    state = {"master": master, "counts": np.arange(4200), "few": np.ones(5, np.float16)}
    state |= {"moment": np.resize(master.astype(np.float16), 16_500), "bytes": np.resize(np.arange(7, dtype=np.uint8), 33_000)}
    committer, described = Committer(create_repository(folder), "make_golden_deltas.py"), {}
    for i in range(3):
        before, state = state, moved(state) if i else state
        rows, pack = rows_and_pack({name: whole(array) for name, array in state.items()}, (i, before) if i else None)
        (own,) = [structs.replace(row, kind="tensor") for row in rows if row.name == "master"]
        bits = derive(state["master"].reshape(-1).view(np.uint8), "float32", "float16")
        weights = structs.replace(
            own, name="weights", dtype="float16", derivation=Derivation("master", "float32"), raw_digest=raw_digest(bits)
        )
        write_rows(committer, [*(own if row.name == "master" else row for row in rows), weights], pack)
        held = {**state, "weights": bits}
        described[str(i + 1)] = {name: blake3(np.ascontiguousarray(array).tobytes()).hexdigest() for name, array in held.items()}
    (Path(folder) / "expected.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
