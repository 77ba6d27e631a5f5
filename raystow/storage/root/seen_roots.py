"""Remembers on this machine how far each root had come, so that an older root that was put back is noticed.

The root is not signed, and an older one is as valid as the newest. ``RAYSTOW_SEEN_ROOTS`` names the folder; without it nothing is
remembered.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..addresses import local_path
from ..coding.digest import stored_digest
from ..errors import Damaged, StateError
from ..format import keys
from ..format.root import Root
from ..real_paths import input_path, small_file
from ..runtime.clock import SYSTEM
from ..stores import durable
from ..stores.file_lock import exclusive

SEEN_ROOTS = "RAYSTOW_SEEN_ROOTS"
"""Names the folder in which this machine remembers the roots that it has seen."""

_ASCENDING = "epoch", "next_id", "rollbacks"
_LOCK_SECONDS = 10.0


class SeenRoot:
    """The newest root that this machine has seen of a repository when this object is made: before the root is read, since another
    process may read a newer one meanwhile.

    Args:
        uri: Where the repository is. A replica of the same repository has a history of its own.
        repository: Its id.

    Raises:
        StateError: The folder or what it contains cannot be used.
    """

    def __init__(self, uri: str, repository: str) -> None:
        folder = os.environ.get(SEEN_ROOTS)
        if folder == "":
            raise StateError("is set, but empty", subject=SEEN_ROOTS, remedy="unset it, or set it to a folder")
        name = stored_digest(f"{uri} {repository}".encode("utf-8", "surrogatepass")).hex()[:32]
        self._uri = uri
        self._path = local_path(SEEN_ROOTS, folder) / f"{name}.json" if folder is not None else None
        self._before = _load(self._path) if self._path is not None else {}

    def check(self, root: Root) -> None:
        """Raise ``Damaged`` if a root that was read since is older."""
        for name, seen in self._before.items():
            if (now := getattr(root, name)) < seen:
                what = f"an older root was put back: {name} is {now}, and this machine has seen {seen}"
                remedy = f"find out who has written it; if a backup or a repair was intended, delete {self._path}"
                raise Damaged(what, subject=keys.ROOT, remedy=remedy)

    def note(self, root: Root) -> None:
        """Remember a root. Raises ``StateError`` if the folder cannot be written."""
        now = {name: int(getattr(root, name)) for name in _ASCENDING}
        if self._path is None or now == self._before:
            return
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with exclusive(self._path.with_suffix(".lock"), timeout=_LOCK_SECONDS, clock=SYSTEM):
                most = {name: max(now[name], seen) for name, seen in _load(self._path).items()} or now
                durable.write(folder, self._path.name, [json.dumps({"uri": self._uri, **most}).encode()], SYSTEM)
        except OSError as error:
            remedy = f"let {SEEN_ROOTS} name a folder that can be written"
            raise StateError(f"cannot be written: {error.strerror}", subject=str(self._path), remedy=remedy) from error


def _load(path: Path) -> dict[str, int]:
    try:
        fields = json.loads(small_file(input_path(path.parent, path.name)))
        return {name: int(fields[name]) for name in _ASCENDING}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StateError(f"cannot be read: {error}", subject=str(path), remedy="delete it to forget what was seen") from error
