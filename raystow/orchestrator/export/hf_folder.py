"""Writes the weights of a version, or a LoRA adapter, as a folder that ``from_pretrained`` of Hugging Face's libraries loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from ...storage.coding import dtypes
from ...storage.errors import StateError
from ...storage.real_paths import input_path, real_path, regular_file, small_file
from ...storage.versions.version import TensorInfo, Version
from . import adapter_names, version_files
from .output_folder import FilePlan, WriteFile
from .safetensors_file import SafetensorsFile, group_files
from .tied_weights import tied_weights
from .weight_prefix import refuse_adapters, refuse_wrapped, weights_below

_CONFIG = "config.json"
_MODEL, _ADAPTER = "model", "adapter_model"  # the names of files of weights, without their ends
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "*.md", "LICENSE*")
_PIECE = 1 << 20
_NOT_COPIED = (".*", "*.index.json", "trainer_state.json")


@dataclass(frozen=True)
class HfFolder:
    """The content of a folder.

    Attributes:
        version: The version with the weights.
        prefix: What its names have before those of the model.
        names: Its name of each name in the files.
        files: The files of weights.
        tied: The names that are left out, each with the name of the same weight.
        copied: Other files, such as config and tokenizer: names and real paths.
        dtype: The dtype that was asked for.
    """

    version: Version
    prefix: str
    names: Mapping[str, str]
    files: list[SafetensorsFile]
    tied: Mapping[str, str]
    copied: Mapping[str, Path]
    dtype: str | None

    @property
    def raw(self) -> int:
        """The bytes of the tensors in the version."""
        infos = self.version.tensors()
        return sum(infos[self.names[tensor.name]].nbytes for file in self.files for tensor in file.tensors)

    @property
    def plan(self) -> FilePlan:
        """The files, before they are written."""
        index = [version_files.index_name(self.files)] if len(self.files) > 1 else []
        return version_files.file_plan(self.version, self.files, [*self.copied, *index])

    def write(self, write: WriteFile, progress: Callable[[int], None]) -> None:
        """Fill an empty folder. Memory is bounded by the slab of ``version_files``. The index and the config are the last files:
        no library loads the folder before."""
        configs = [name for name in (_CONFIG, adapter_names.CONFIG) if name in self.copied]
        for name in self.copied.keys() - configs:
            self._copy(write, name)
        for file in self.files:
            version_files.write_file(write, file, self.version, progress, names=self.names)
        if len(self.files) > 1:
            version_files.write_index(write, self.files)
        for name in configs:
            self._copy(write, name)

    def _copy(self, write: WriteFile, name: str) -> None:
        path = self.copied[name]
        if name == _CONFIG and self.dtype is not None:
            version_files.write_json(write, _CONFIG, _with_dtype(path, self.dtype))
            return
        with regular_file(path) as source:
            write(name, os.fstat(source.fileno()).st_size, lambda: _pieces(source))

    def refuse_unloadable(self) -> None:
        """Raise ``StateError`` for names of weights that ``from_pretrained`` does not load."""
        names = [name.removeprefix(self.prefix) for name in self.names.values()]
        refuse_wrapped(names, self.prefix)
        if self.files[0].group == _MODEL:
            refuse_adapters(names, self.prefix)


def plan_folder(version: Version, *, prefix: str | None, dtype: str | None, source: Path | None, limit: int) -> HfFolder:
    """Decide what a folder contains: an adapter in one file if there is a config of one, else the model.

    Args:
        version: The version with the weights.
        prefix: See ``weights_below``.
        dtype: Floating-point numbers of 16 bits and more are converted to it; None keeps them.
        source: A folder with config and tokenizer files, if any.
        limit: The bytes of a file; a larger tensor has a file of its own.

    Raises:
        StateError: The weights are not found or have a dtype that safetensors lacks; ``source`` is not a folder, or a link in it
            leads out of it; or the adapter is not one that PEFT would write.
    """
    prefix, weights = weights_below(version, prefix)
    copied = files_to_copy(source) if source is not None else {}
    config = copied.get(adapter_names.CONFIG)
    if config is None:
        tied = tied_weights(source / _CONFIG, version, weights, prefix) if source is not None and _CONFIG in copied else {}
        names = {name: prefix + name for name in weights if name not in tied}
        group = _MODEL
    else:
        found = adapter_names.adapter_names(weights, _fields(config))
        tied, names = {}, {name: prefix + of for name, of in found.items()}
        group, limit = _ADAPTER, sum(info.nbytes for info in weights.values()) + 1
    infos = version.tensors()
    files = group_files(group, {name: _converted(infos[of], dtype) for name, of in names.items()}, limit=limit)
    for tensor in (tensor for file in files for tensor in file.tensors if tensor.mapped):
        what = f"safetensors has no {tensor.info.dtype}"
        raise StateError(what, subject=names[tensor.name], remedy="`raystow restore` writes it as another dtype")
    return HfFolder(version, prefix, names, files, tied, copied, dtype)


def _pieces(source: IO[bytes]) -> Iterator[bytes]:
    source.seek(0)
    while piece := source.read(_PIECE):
        yield piece


def _converted(info: TensorInfo, dtype: str | None) -> TensorInfo:
    if dtype is None or info.dtype not in dtypes.MANTISSA:
        return info
    nbytes = info.nbytes // dtypes.dtype(info.dtype).itemsize * dtypes.dtype(dtype).itemsize
    return replace(info, dtype=dtype, nbytes=nbytes)


def files_to_copy(source: Path) -> dict[str, Path]:
    """The files of a model besides its weights: only these, because others may be private and the export may be published. So
    links lead to such files only."""
    if not source.is_dir():
        raise StateError("is not a folder", subject=str(source), remedy="give the folder that has config.json")

    def belongs(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in _COPIED) and not any(fnmatch(name, p) for p in _NOT_COPIED)

    home = real_path(source)
    found = {name: input_path(source, name) for name in sorted(os.listdir(source)) if belongs(name)}
    return {name: path for name, path in found.items() if path.is_file() and (belongs(path.name) or home not in path.parents)}


def _with_dtype(config: Path, dtype: str) -> dict[str, object]:
    """The fields of a config.json with the dtype of the files, if it names any: it is the one that from_pretrained loads."""
    fields = _fields(config)
    return fields | {key: dtype for key in ("dtype", "torch_dtype") if key in fields}


def _fields(config: Path) -> dict[str, object]:
    try:
        return dict(json.loads(small_file(config)))
    except (ValueError, TypeError, RecursionError) as error:
        raise StateError("is not a JSON object", subject=str(config)) from error
