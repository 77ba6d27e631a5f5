"""The JSON Schemas of the commands' output, made strict: undeclared properties are rejected."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def check(command: str, output: Any) -> None:
    """Raise ``jsonschema.ValidationError`` unless the output matches the command's schema and has no undeclared property."""
    _validator(command).validate(output)


@cache
def _validator(command: str) -> Draft202012Validator:
    schemas = {path.name: _strict(json.loads(path.read_text())) for path in FOLDER.glob("*.json")}
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    registry: Registry[Any] = Registry().with_resources([(name, Resource.from_contents(s)) for name, s in schemas.items()])
    return Draft202012Validator(schemas[f"{command}.json"], registry=registry)


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return closed | {name: _strict(part) for name, part in schema.items()}
