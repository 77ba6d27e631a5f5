"""Validates objects against the schemas of Kubernetes and of custom resources; unknown fields are errors."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

KUBERNETES = "1.35"
_SCHEMAS = Path(__file__).parent / "schemas"
_CUSTOM = {"RayCluster", "RayJob", "PodMonitor"}


def problems(thing: dict[str, Any]) -> list[str]:
    """Return the problems of an object."""
    if thing["kind"] not in _CUSTOM:
        try:
            kubernetes_validate.validate(thing, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{thing['kind']} {_path(error)}: {error.message}"]
        return []
    schema = _schema(thing["kind"])
    filled = copy.deepcopy(thing)
    _fill(filled, schema)
    errors = jsonschema.Draft202012Validator(schema).iter_errors(filled)
    return [f"{thing['kind']} {_path(error)}: {error.message}" for error in errors]


@functools.cache
def _schema(kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((_SCHEMAS / f"{kind}.v1.json").read_text())
    _close(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # as in any object: the custom definitions do not describe it
    return schema


def _close(schema: Any) -> None:
    """Reject unknown fields, and translate ``int-or-string`` to JSON Schema."""
    if isinstance(schema, list):
        for part in schema:
            _close(part)
    if not isinstance(schema, dict):
        return
    for part in schema.values():
        _close(part)
    if isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string") is True:
        schema.pop("anyOf", None)
        schema["type"] = ["integer", "string"]


def _fill(value: Any, schema: dict[str, Any]) -> None:
    """Insert defaults for missing fields, because they can make other fields required."""
    for name, part in schema.get("properties", {}).items():
        if isinstance(value, dict):
            if name not in value and "default" in part:
                value[name] = copy.deepcopy(part["default"])
            if name in value:
                _fill(value[name], part)
    if isinstance(value, list) and "items" in schema:
        for item in value:
            _fill(item, schema["items"])


def _path(error: jsonschema.ValidationError) -> str:
    return ".".join(str(step) for step in error.absolute_path) or "itself"
