"""Finds the safetensors files to import, as Hugging Face's tools write them: one, or several with an index."""

from __future__ import annotations

import json
from pathlib import Path

from ...storage.errors import StateError
from .safetensors_file import Listed, header_size, listed

_INDEX = ".safetensors.index.json"


def find(source: Path) -> dict[Path, list[Listed]]:
    """The tensors of each file: of ``source`` itself, of the files that it names as an index, or of all in it as a folder.

    ``StateError`` if there are none, a name is there twice, or an index tells of a tensor that is not where it should be.
    """
    indices = sorted(source.glob(f"*{_INDEX}")) if source.is_dir() else [source] if source.name.endswith(_INDEX) else []
    maps = [_weight_map(index) for index in indices]
    if source.is_dir():
        paths = sorted(source.glob("*.safetensors"))
    else:
        paths = sorted({source.parent / name for of in maps for name in of.values()}) if maps else [source]
    if not paths:
        raise StateError("there is no safetensors file", subject=str(source), remedy="name a folder that has some, or a file")
    files = {path: _tensors(path) for path in paths}
    homes: dict[str, str] = {}
    for path, tensors in files.items():
        for tensor in tensors:
            if tensor.name in homes:
                what = f"{homes[tensor.name]} and {path.name} both have a tensor {tensor.name!r}"
                raise StateError(what, subject=str(source), remedy="name one file, or an index")
            homes[tensor.name] = path.name
    lost = [name for of in maps for name, file in of.items() if homes.get(name) != file]
    if lost:
        raise StateError(f"{len(lost)} tensors are not where the index says, {lost[0]!r} first", subject=str(source))
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """The tensors of an index, each with the name of a file beside it."""
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        if all(isinstance(file, str) and Path(file).name == file for file in found.values()):
            return {str(name): file for name, file in found.items()}
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        pass
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror}", subject=str(index)) from error
    raise StateError("is not an index of safetensors files", subject=str(index))


def _tensors(path: Path) -> list[Listed]:
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            size = header_size(file.read(8), nbytes)
            return listed(file.read(size), nbytes)
    except StateError as error:
        raise StateError(error.what, subject=str(path), remedy=error.remedy) from error
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror}", subject=str(path)) from error
