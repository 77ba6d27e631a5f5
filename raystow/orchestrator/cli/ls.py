"""``raystow ls``: what versions there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .present import age, count, emit, out, ratio, ratio_text, size, table
from .target import Json, Target, Uri, open_target

if TYPE_CHECKING:
    from ...storage.version import Version


def ls(
    uri: Uri,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also the world size: reads one more small object for each version.")
    ] = False,
    json: Json = False,
) -> None:
    """List the versions of a repository, oldest first.

    Reads two small objects, whatever the size of the checkpoints. RATIO is stored bytes by raw bytes. A version that was thinned
    says what it still holds.

    Example:  raystow ls s3://bucket/runs/llama
    """
    target = open_target(uri)
    rows = [_row(target, version, long) for version in target.versions()]
    if json:
        emit({"uri": target.repository.uri, "repository": target.repository.id, "versions": rows})
    elif not rows:
        out.print(f"no version yet in {target.repository.uri}", soft_wrap=True)
    else:
        headers = [">ID", ">STEP", ">CREATED", *([">WORLD"] if long else []), ">RAW", ">STORED", ">RATIO", "PINS", ""]
        out.print(table("", headers, map(_cells, rows)))
        out.print(count(len(rows), "version") + f", {size(sum(row['stored'] for row in rows))} stored", style="dim")


def _row(target: Target, version: Version, long: bool) -> dict[str, Any]:
    return {
        **target.facts(version.entry),
        **({"world_size": version.world_size} if long else {}),
        "raw": version.raw,
        "ratio": ratio(version.bytes, version.raw),
        "groups": list(version.entry.groups) or None,
        "pins": target.pins(version.id),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["id"]),
        str(row["step"]),
        f"{age(row['age'])} ago",
        *([str(row["world_size"])] if "world_size" in row else []),
        size(row["raw"]),
        size(row["stored"]),
        ratio_text(row["stored"], row["raw"]),
        ", ".join(row["pins"]),
        f"{' and '.join(row['groups'])} only" if row["groups"] else "",
    ]
