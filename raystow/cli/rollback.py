"""``raystow rollback``."""

from __future__ import annotations

from ..storage.versions.version_selector import LATEST
from .options import Json, Uri, Which
from .output import count, emit, say
from .target import open_target


def rollback(uri: Uri, version: Which, json: Json = False) -> None:
    """Make an earlier version the newest again.

    Later restores of the latest version start from VERSION or, if it is damaged, from an earlier version in its history. Versions
    outside its history are rolled back: they can be read by their ids, until retention or `raystow prune --drop-rolled-back`
    drops them. Saves in progress fail. Saves that begin later are newer than every version, so stop or restart the training. A
    rollback to the previous newest version undoes it.

    Example:  raystow rollback s3://bucket/runs/llama 6
    """
    target = open_target(uri)
    chosen, before = target.version(version), target.version(LATEST)
    rolled_back = target.repository.rollback(chosen)
    if json:
        ids = [one.id for one in rolled_back]
        emit({"uri": target.uri, "version": chosen.id, "step": chosen.step, "before": before.id, "rolled_back": ids})
        return
    say(f"version {chosen.id} (step {chosen.step}) is the newest; {count(len(rolled_back), 'version')} rolled back")
    say("versions saved from now on are newer: stop a training that still runs")
    if before.id != chosen.id:
        say(f"`raystow rollback URI {before.id}` undoes this")
