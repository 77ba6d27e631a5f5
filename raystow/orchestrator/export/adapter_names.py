"""Finds a LoRA adapter in the state of a PEFT model, and the names that its tensors have in PEFT's files. Does not need PEFT.

``get_peft_model_state_dict`` of PEFT 0.21 chooses the same tensors, and names them so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from ...storage.errors import StateError

CONFIG = "adapter_config.json"
"""The file of an adapter's settings."""

_TOP = "base_model.model."  # in all names of a file, also if the adapter was injected into a model without a PeftModel around it
_LORA = re.compile(r"(?P<layer>(?:.*\.)?)lora_\w+(?:\.(?!weight$|bias$)(?P<adapter>[^.]+))?(?:\.(?:weight|bias))?")
_BASE = re.compile(r"base_layer\.")
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|lm_head)\.")
_REMEDY = "restore the version into the PEFT model, and call its save_pretrained"


def adapter_names(names: Collection[str], config: Mapping[str, object]) -> dict[str, str]:
    """Return the adapter's tensors: the names in the file, each with the name in the state.

    Args:
        names: Those of the model's state, below its prefix: of a ``PeftModel``, of a model with injected adapters, or what
            ``get_peft_model_state_dict`` returns, whose names are kept.
        config: The content of ``adapter_config.json``.

    Raises:
        StateError: The adapter is not of LoRA, or the state has no adapter, or several.
    """
    if (kind := config.get("peft_type")) != "LORA":
        raise StateError(f"is of an adapter of type {kind!r:.40}, not LORA", subject=CONFIG, remedy=_REMEDY)
    wrapped = {name[: base.start()] for name in names for base in _BASE.finditer(name)}
    found = [match for name in names if (match := _LORA.fullmatch(name))]
    found = [match for match in found if match["adapter"] and match["layer"] in wrapped] or found  # not those of the base model
    adapters = {match["adapter"] for match in found}
    if len(adapters) != 1:
        what = f"the state has {len(adapters)} adapters{': ' * bool(adapters)}{', '.join(sorted(map(str, adapters)))}"
        raise StateError(what, subject=CONFIG, remedy=_REMEDY if adapters else "give --files without adapter_config.json")
    (adapter,) = adapters
    if adapter is None:
        return {_under_top(name): name for name in names}
    layers = {match["layer"] for match in found}
    chosen = {match[0] for match in found} | {*_trained_with_it(names, layers, adapter, config)}
    return {_under_top(_without(adapter, name)): name for name in sorted(chosen)}


def _trained_with_it(
    names: Collection[str], layers: Collection[str], adapter: str, config: Mapping[str, object]
) -> Iterator[str]:
    """The tensors that belong to an adapter besides those of LoRA: of modules that are trained as a whole, of new tokens, biases,
    and embeddings that it adapts."""
    bias, all_tokens = config.get("bias"), config.get("trainable_token_indices") is None
    for name in names:
        whole = f".modules_to_save.{adapter}." in f".{name}"
        tokens = name.endswith(f"token_adapter.trainable_tokens_delta.{adapter}")
        of_layer = {layer for base in _BASE.finditer(name) if (layer := name[: base.start()]) in layers}
        biases = (bias == "all" and name.endswith(".bias")) or (
            bias == "lora_only" and any(name == f"{layer}base_layer.bias" for layer in of_layer)
        )
        if whole or tokens or biases or (all_tokens and any(map(_EMBEDDING.fullmatch, of_layer))):
            yield name


def _without(adapter: str, name: str) -> str:
    """The name without that of its adapter, which is at the end, or before the name of a module's parameter."""
    if f".modules_to_save.{adapter}." in f".{name}":
        return name.replace(f"modules_to_save.{adapter}.", "", 1)
    name = re.sub(rf"(lora_magnitude_vector\.{re.escape(adapter)})\.weight", r"\1", name)
    if name.endswith(f".{adapter}"):
        return name.removesuffix(f".{adapter}")
    module, _, parameter = name.rpartition(".")
    return f"{module.removesuffix(f'.{adapter}')}.{parameter}"


def _under_top(name: str) -> str:
    if f".{_TOP}" in name:
        outer = name[: name.index(_TOP)]
        raise StateError("is the name of a PEFT model within another one", subject=name, remedy=f"add {outer} to --prefix")
    return name if name.startswith(_TOP) else _TOP + name
