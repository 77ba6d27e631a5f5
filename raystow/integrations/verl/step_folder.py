"""The folder that verl makes for each step, ``<default_local_dir>/global_step_<N>``: its path, and its files in a version.

verl writes small files there: the data loader's state, config and tokenizer. They are tensors of bytes in the version, with the
prefix ``files.``. The files of a version are restored to ``<default_local_dir>/version_<id>/global_step_<N>``, so that the path,
which verl passes to every worker, names the version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from ...state.box import Box
from ...storage.errors import Damaged, StateError
from ...storage.real_paths import input_path, regular_file
from ...storage.runtime.clock import SYSTEM
from ...storage.versions.version import Version
from ...storage.versions.version_selector import VersionSelector

FILES = "files"
"""The key of the files in the state."""

_STEP, _VERSION = re.compile(r"global_step_(\d+)"), re.compile(r"version_(\d+)")
_WEIGHTS = {".safetensors", ".bin"}  # of ``hf_model``: the version has them as tensors


@dataclass(frozen=True)
class StepFolder:
    """``root``: ``trainer.default_local_dir``. ``version``: the id in the path, if it is a restored folder."""

    root: str
    path: Path
    step: int
    version: int | None = None

    @property
    def selector(self) -> VersionSelector:
        """The version of which the folder has the files."""
        return f"step:{self.step}" if self.version is None else self.version


def find_step_folder(path: str | os.PathLike[str]) -> tuple[StepFolder, str] | None:
    """Split a path that verl gives to a checkpoint manager into the folder of the step and the role below it, which may be "".
    None if the path is in no such folder."""
    parts = Path(path).absolute().parts
    for i in range(len(parts) - 1, 0, -1):
        if step := _STEP.fullmatch(parts[i]):
            version = _VERSION.fullmatch(parts[i - 1])
            root = str(Path(*parts[: i - 1 if version else i]))
            number = int(version[1]) if version else None
            return StepFolder(root, Path(*parts[: i + 1]), int(step[1]), number), "/".join(parts[i + 1 :])
    return None


def step_folder(path: str | os.PathLike[str]) -> tuple[StepFolder, str]:
    """``find_step_folder``; raises ``StateError`` if there is none."""
    found = find_step_folder(path)
    if found is None:
        raise StateError("is not in a folder global_step_N", subject=str(path), remedy="use verl's trainers, or such a path")
    return found


def restored_folder(root: str, version: Version) -> Path:
    """Where the files of a version are restored."""
    return Path(root) / f"version_{version.id}" / f"global_step_{version.step}"


def read_files(folder: Path, skip: Collection[str] = ()) -> dict[str, bytes]:
    """Read the files below a folder, except weights, by their paths in it. ``skip``: folders in it that are not read. Raises
    ``StateError`` if a link leads out of the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] not in skip and path.suffix not in _WEIGHTS:
            with regular_file(input_path(folder, name)) as file:
                found[name.as_posix()] = file.read()
    return found


def state_of_files(files: dict[str, bytes]) -> dict[str, Box]:
    """The files as tensors that only this rank has. An empty file is left out, as a tensor without elements is on no rank."""
    tensors = {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in files.items() if content}
    return {name: Box(tensor, tuple(tensor.shape), (0,)) for name, tensor in tensors.items()}


def write_files(version: Version, folder: str | os.PathLike[str]) -> None:
    """Write the files of a version to a folder: config, tokenizer and the data loader's state.

    Args:
        version: The version.
        folder: Where to. It is made if it does not exist.

    Raises:
        Damaged: A file would be outside of the folder; nothing is written then.
        StateError: A link in the folder leads out of it.
    """
    names = [name.removeprefix(f"{FILES}.") for name in version.tensors() if name.startswith(f"{FILES}.")]
    for name in names:
        parts = PurePosixPath(name).parts
        if "\0" in name or name.startswith("/") or ".." in parts or "/".join(parts) != name:
            raise Damaged(f"the file name {name!r} is not relative to its folder", subject=repr(version))
    for name in names:
        path = input_path(Path(folder), Path(name).parent) / Path(name).name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{SYSTEM.token()}")  # another rank of this node may write the same file
        with part.open("xb") as file:
            file.write(version.read(f"{FILES}.{name}").numpy().tobytes())
        part.replace(path)
