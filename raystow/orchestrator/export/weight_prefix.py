"""Finds the model's weights in a version, and the prefix that their names have in the saved state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from ...storage.coding import dtypes
from ...storage.errors import StateError
from ...storage.format.groups import WEIGHTS, group
from ...storage.format.manifest import parse_path
from ...storage.notebook import size
from ...storage.versions.version import TensorInfo, Version

_WRAPPERS = re.compile(r"((module|_orig_mod)\.)*")
"""What DistributedDataParallel and torch.compile put before the names of a model's weights."""

_ADAPTER = re.compile(
    r"base_model\.model\.|(.*\.)?(base_layer|modules_to_save|(lora|ia3|hada|lokr|oft|boft|vera)_\w+|prompt_encoder\.default)\."
)
"""What PEFT adds to the names of a model."""
_INNER = re.compile(r"(.*\.)?(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""What torch adds to the names of a wrapped part of a model."""

_OWN = "if the code of the model has such names, add --keep-names"
_LISTED = 8  # candidates in an error


def weights_below(version: Version, prefix: str | None) -> tuple[str, dict[str, TensorInfo]]:
    """Return a prefix of names, and the tensors that have it, by their names without it.

    Args:
        version: The version to export.
        prefix: The prefix of all tensors to return. None: take the tensors of the only mapping that has floating-point numbers
            other than optimizer state; the prefix then includes the names of wrappers.

    Raises:
        StateError: No tensor has the prefix, or the version has no such mapping or several.
    """
    infos = version.tensors()
    weights = {name for name, info in infos.items() if group(name) == WEIGHTS and dtypes.dtype(info.dtype).is_float}
    if prefix is None:
        mappings = {_prefixes(version, name)[-1] for name in weights}
        if len(mappings) != 1:
            what = f"{len(mappings)} mappings have weights{_candidates(version, weights)}"
            raise StateError(what, subject=f"version {version.id} of {version.store.uri}", remedy="name one with --prefix")
        (mapping,) = mappings
        names = [name for name in infos if _prefixes(version, name)[-1] == mapping]
        wrappers = {found[0] for name in names if (found := _WRAPPERS.match(name.removeprefix(mapping)))}
        prefix = mapping + (wrappers.pop() if len(wrappers) == 1 else "")
    else:
        names = [name for name in infos if name.startswith(prefix)]
    if not prefix:
        names = [name for name in names if group(name) == WEIGHTS]
    if not names:
        what = f"no tensor has the prefix {prefix!r}; prefixes with weights{_candidates(version, weights) or ': none'}"
        raise StateError(what, subject=f"version {version.id} of {version.store.uri}", remedy="name another with --prefix")
    return prefix, {name.removeprefix(prefix): infos[name] for name in names}


def refuse_adapters(names: Iterable[str], prefix: str) -> None:
    """Raise ``StateError`` for names of PEFT: a model of Transformers would leave out their weights with a warning only."""
    if (name := min(filter(_ADAPTER.match, names), default=None)) is not None:
        adapter = "export the adapter by --files with a folder that has adapter_config.json; or restore into the PEFT model"
        remedy = f"{adapter}, call merge_and_unload, and save the result; {_OWN}"
        raise StateError("is a name of PEFT, which from_pretrained does not load", subject=prefix + name, remedy=remedy)


def refuse_wrapped(names: Iterable[str], prefix: str) -> None:
    """Raise ``StateError`` for names of wrapped modules, which neither Transformers nor PEFT loads."""
    if (name := min(filter(_INNER.match, names), default=None)) is not None:
        what = "is a name of a wrapped module, which from_pretrained does not load"
        remedy = f"restore it into the wrapped model, and save the model without wrappers; {_OWN}"
        raise StateError(what, subject=prefix + name, remedy=remedy)


def _prefixes(version: Version, name: str) -> list[str]:
    """The prefixes that a tensor's name has as an element of each mapping around it, the outermost first."""
    path = parse_path(version.contents.tensors[name].path)
    keys = [str(part[1] if isinstance(part, tuple) else part) for part in path]
    return ["".join(f"{key}." for key in keys[:depth]) for depth in range(len(keys))]


def _candidates(version: Version, weights: Iterable[str]) -> str:
    """The prefixes that weights have, with the bytes of each, largest first."""
    infos, sizes = version.tensors(), Counter[str]()
    for name in weights:
        sizes.update(dict.fromkeys(_prefixes(version, name), infos[name].nbytes))
    listed = ", ".join(f"{prefix!r} ({size(nbytes)})" for prefix, nbytes in sizes.most_common(_LISTED))
    return f": {listed}" if listed else ""
