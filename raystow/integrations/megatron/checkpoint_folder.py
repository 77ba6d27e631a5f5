"""A folder that Megatron's training loop looks into for checkpoints: what it finds there names versions of a repository.

<folder>/latest_checkpointed_iteration.txt      the newest iteration
<folder>/iter_0000100/metadata.json             as of Megatron's own checkpoints
<folder>/iter_0000100/raystow.json              the repository, and the id of the version

The repository decides: the files are written from it before Megatron looks, so the folder may be on a disk of one node.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig

from ...storage.errors import Damaged, NotARepository
from ...storage.repository import open_repository
from ...storage.runtime.clock import SYSTEM
from ...storage.versions.version import Version

METRIC = "megatron_checkpoint"
"""The metric of a version with the names of its two folders, such as ``checkpoints/iter_0000100``."""
_POINTER, _TRACKER = "raystow.json", "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class CheckpointPointer:
    """The version that the folder of an iteration stands for."""

    repository: str
    version: int

    def write(self, folder: Path) -> None:
        """Make the folder that of a complete checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / CONFIG_FNAME, json.dumps(asdict(CheckpointingConfig("torch_dist"))))
        _replace(folder / _POINTER, json.dumps({"repository": self.repository, "version": self.version}))

    def open(self) -> Version:
        return open_repository(self.repository).version(self.version)


def pointer_in(folder: str | os.PathLike[str]) -> CheckpointPointer | None:
    """What the folder of an iteration stands for; None if Megatron itself has written it. ``Damaged`` for another content."""
    path = Path(folder, _POINTER)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        return CheckpointPointer(str(content["repository"]), int(content["version"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged("the file does not name a version", subject=str(path), remedy="delete it: it is written again") from error


def place_of(folder: str | os.PathLike[str]) -> str:
    """The names of the folder of an iteration and of that around it."""
    return "/".join(Path(folder).absolute().parts[-2:])


def complete(folder: str | os.PathLike[str], uri: str, iteration: int | None = None) -> None:
    """Write the files of the newest version that was saved to a folder of this name, and those of ``iteration``. The tracker is
    left as it is if it names a newer checkpoint of Megatron itself."""
    try:
        repository = open_repository(uri)
    except NotARepository:
        return
    name = Path(folder).absolute().name
    places = [(place, version) for version in repository.versions() if (place := _place(version, name))]
    if not places:
        return
    newest = places[-1]
    asked = [one for one in reversed(places) if one[0] == f"iter_{iteration or 0:07d}"]
    for place, version in [*asked[:1], newest]:
        CheckpointPointer(repository.uri, version.id).write(Path(folder, place))
    latest = newest[0].removeprefix("iter_")
    if latest.isdecimal() and _of_megatron(folder) > int(latest):
        return
    _replace(Path(folder, _TRACKER), str(int(latest)) if latest.isdecimal() else latest)


def _place(version: Version, name: str) -> str:
    """The folder of a version in that with this name; empty if it was saved to another one."""
    around, _, place = str(version.metrics.get(METRIC, "")).partition("/")
    return place if around == name else ""


def _of_megatron(folder: str | os.PathLike[str]) -> int:
    """The iteration of the tracker if Megatron itself has saved it, without raystow; otherwise -1."""
    tracker = Path(folder, _TRACKER)
    text = tracker.read_text().strip() if tracker.is_file() else ""
    at = Path(folder, f"iter_{text:0>7}")
    return int(text) if text.isdecimal() and (at / CONFIG_FNAME).is_file() and pointer_in(at) is None else -1


def _replace(path: Path, text: str) -> None:
    """Write a file that other processes may write or read now, also on other nodes."""
    if path.is_file() and path.read_text() == text:
        return
    draft = path.with_name(f"{path.name}.{SYSTEM.token()}")
    draft.write_text(text)
    draft.replace(path)
