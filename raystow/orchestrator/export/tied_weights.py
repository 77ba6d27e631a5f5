"""Finds weights that a model of the Transformers library shares under several names: its files contain such a weight once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...storage.format.manifest import Chunk
from ...storage.format.selection import Sought
from ...storage.versions.version import TensorInfo, Version


def tied_weights(config: Path, version: Version, weights: Mapping[str, TensorInfo], prefix: str) -> dict[str, str]:
    """Return the names to leave out of the files, each with the name that has the same bytes.

    The model is asked, not only the bytes, because weights that are equal by chance (zeros, ones) must all be in the files.

    Args:
        config: The model's config.json.
        version: The version that has the weights.
        weights: The names to choose from.
        prefix: What the version's names have before these.

    Returns:
        Nothing if Transformers is not installed, or does not know the model: files with all names are loaded, too.
    """
    shared = [[name for name in names if name in weights] for names in _shared_names(config)]
    rows = version.rows({prefix + name: Sought(tensor=True) for names in shared if len(names) > 1 for name in names})
    first: dict[str, str] = {}
    for kept, *others in filter(None, shared):
        first |= {name: kept for name in others if _content(rows[prefix + name]) == _content(rows[prefix + kept])}
    return first


def _shared_names(config: Path) -> list[list[str]]:
    """The names of each parameter that the model of a config.json has under several names."""
    if not config.exists():
        return []
    try:
        import torch
        import transformers

        settings = transformers.AutoConfig.from_pretrained(config.parent, local_files_only=True, trust_remote_code=False)
        model_class = getattr(transformers, settings.architectures[0])
        if not issubclass(model_class, transformers.PreTrainedModel):
            return []
        with torch.device("meta"):  # without memory
            parameters = model_class(settings).state_dict(keep_vars=True)
    except Exception:  # Transformers is missing, or does not know the model: its classes raise errors of any kind
        return []
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _content(rows: Sequence[Chunk]) -> object:
    """What two tensors of a version have in common only if they have the same elements. Digests of 64 bits do not prove that."""
    return rows[0].dtype, rows[0].shape, {(row.box, row.proof) for row in rows}
