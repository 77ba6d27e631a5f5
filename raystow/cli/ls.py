"""``raystow ls``."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Json, Uri
from .output import count, emit, out, printable, ratio, ratio_text, say, size, table
from .target import Target, open_target, segment_fields, segments_text


def ls(
    uri: Uri,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Add world size and parts; reads one more small object per version.")
    ] = False,
    json: Json = False,
) -> None:
    """List the versions of a repository, oldest first.

    RATIO is stored bytes divided by raw bytes: smaller is better. The list marks rolled-back versions and names the remaining
    groups of thinned versions. Reads two small objects.

    Example:  raystow ls s3://bucket/runs/llama
    """
    target = open_target(uri)
    versions = target.listed()
    if json:
        rows: dict[str, list[object]] = {"versions": [], "rolled_back": []}
        for version in versions:
            sizes = {"raw": version.raw, "ratio": ratio(version.bytes, version.raw)}
            rest = {"groups": version.entry.groups or None, "pins": target.pins(version.id)}
            ranks = {"world_size": version.world_size, "parts": version.parts()} if long else {}
            row = {**target.fields(version.entry), **ranks, **sizes, **rest}
            at = target.rolled_back(version.id)
            rows["versions" if at is None else "rolled_back"].append(row | ({"at": at} if at is not None else {}))
        segments = [segment_fields(one) for one in target.root.segments]
        exports = {"exports": target.root.exports, "failed_exports": target.root.failed_exports}
        emit({"uri": target.uri, "repository": target.repository.id, **rows, "segments": segments, **exports})
        return
    if not versions:
        out.print(f"no version yet in {target.uri}")
        _print_segments(target)
        return
    cells = []
    for version in versions:
        *first, stored = target.cells(version.entry)
        ranks_cell = [str(version.world_size)] if long else []
        notes = [f"{' and '.join(version.entry.groups)} only"] if version.entry.groups else []
        notes += [f"with {' and '.join(parts)}"] if long and (parts := version.parts()) else []
        notes += [f"exported to {place}" for place, id in target.root.exports.items() if id == version.id]
        notes += ["rolled back"] if target.rolled_back(version.id) is not None else []
        sizes_cells = [size(version.raw), stored, ratio_text(version.bytes, version.raw)]
        cells.append([*first, *ranks_cell, *sizes_cells, ", ".join(target.pins(version.id)), ", ".join(notes)])
    headers = [">ID", ">STEP", ">CREATED", *([">WORLD"] if long else []), ">RAW", ">STORED", ">RATIO", "PINS", ""]
    out.print(table("", headers, cells))
    out.print(count(len(versions), "version") + f", {size(sum(version.bytes for version in versions))} stored", style="dim")
    _print_segments(target)
    for place, error in target.root.failed_exports.items():
        out.print(printable(f"the export to {place} failed: {error}"), style="yellow")


def _print_segments(target: Target) -> None:
    if text := segments_text(target.root.segments):
        say(f"the journal is {text}", style="dim")
