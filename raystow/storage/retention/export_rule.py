"""Which versions of a training are exported for inference, and where, as data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..addresses import parse
from ..arguments import integer, refused
from ..errors import StateError
from ..format.root import Entry, Root
from .policy import Best

_PIN = "pin:"
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Export:
    """Export versions for ``from_pretrained`` while a training runs.

    After a commit the coordinator exports the version that is due, in the background, one at a time and in at most 512 MiB of
    memory, to ``URI/version-00000007``; see ``export_model``. A failed export is tried again after 30 s, up to six times in a
    quarter of an hour, and after the next commit; the next save of rank 0 warns of it. Exports are never deleted, whatever
    ``retention`` drops. ``raystow ls`` lists them, and failed ones. If the coordinator dies during an export, another one
    completes it, or deletes its part, as soon as rank 0 saves, closes its Checkpointer, or is started again.

    Args:
        uri: A folder that the cluster's head node sees, or an address ``s3://``, ``gs://`` or ``az://``, which is reached with
            the settings of the repository's store if it is of the same kind.
        when: An integer n: every n-th version. ``"best"``: each version that is the best one by ``keep_best`` of the retention
            policy, which is required then. ``"pin:NAME"``: the version with this pin, after the next commit or ``close``.
        prefix: See ``export_model``.
        tokenizer: A folder of the training process on rank 0 with config and tokenizer files, at most 64 MiB.
        dtype: See ``export_model``.
        max_shard_size: See ``export_model``.

    Raises:
        StateError: An argument is invalid.
    """

    uri: str
    when: int | str = 1
    prefix: str | None = None
    tokenizer: str | None = None
    dtype: str | None = None
    max_shard_size: int = 5 * 10**9

    def __post_init__(self) -> None:
        if not isinstance(self.uri, str | os.PathLike):
            raise refused("uri", self.uri, "an address or a path, as text", subject="export")
        if parse(os.fspath(self.uri))[0] not in ("", "s3", "gs", "az"):
            raise StateError(
                "exports go to a folder, or to s3://, gs:// or az://", subject=str(self.uri), remedy="use one of these"
            )
        if not isinstance(self.when, str):
            integer("when", self.when, least=1, instead='"best" or "pin:NAME"', subject="export")
        elif self.when != "best" and (not self.when.startswith(_PIN) or self.when == _PIN):
            raise refused("when", self.when, 'a number of versions, "best" or "pin:NAME"', subject="export")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise refused("dtype", self.dtype, "one of " + ", ".join(_DTYPES), "None", "export")
        integer("max_shard_size", self.max_shard_size, least=1, subject="export")

    def place(self, id: int) -> str:
        """The address of the export of a version."""
        return f"{os.fspath(self.uri).rstrip('/')}/version-{id:08d}"

    def due(self, root: Root, numbers: Mapping[int, float], best: Best | None) -> Entry | None:
        """Return the version that is to be exported now; None if there is none.

        Args:
            root: The root, with the exports that there are.
            numbers: By version, the metric of ``best``.
            best: Which version is the best one.
        """
        places = (self.place(entry.id) for entry in root.listed)
        exported = {root.exports[place] for place in places if place in root.exports}
        chosen: Iterable[Entry]
        if isinstance(self.when, int):
            since = max(exported, default=0)
            newer = [entry for entry in root.versions if entry.id > since]
            chosen = newer[-1:] if len(newer) >= self.when else ()
        elif self.when == "best":
            sign = 1 if best is not None and best[1] == "max" else -1
            ranked = sorted((entry for entry in root.versions if entry.id in numbers), key=lambda e: (sign * numbers[e.id], e.id))
            chosen = ranked[-1:]
        else:
            chosen = [entry for entry in root.listed if entry.id == root.pins.get(self.when.removeprefix(_PIN))]
        return next((entry for entry in chosen if entry.id not in exported), None)
