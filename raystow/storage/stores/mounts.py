"""Checks by the kernel's mount table whether a file system's locks exclude all processes that may commit.

A commit on a file system relies on ``flock``. Where that is missing, or is valid on one of several machines only, two
coordinators could both commit, so such mounts are refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnsafeStore

MOUNTINFO = Path("/proc/self/mountinfo")
"""The mounts of this process."""
_REMEDY = "keep the repository on a local disk, on NFS 4 with its locks on, or in an S3 bucket"
_REFUSED = {
    **dict.fromkeys(("cifs", "smb3", "smbfs"), "SMB shares do not keep locks and renames atomic between clients"),
    "9p": "9p mounts keep flock inside one machine only",
    "virtiofs": "virtiofs mounts keep flock inside one machine only",
    "beegfs": "BeeGFS keeps flock inside one machine only without tuneUseGlobalFileLocks=true in its client's configuration",
    "afs": "AFS has no lock that orders writers on several machines",
    "vboxsf": "shared folders of a virtual machine have no locks between the machines",
    "fuse": "FUSE file systems may take a lock without keeping it",
}


@dataclass(frozen=True)
class _Mount:
    device: str
    point: str
    kind: str
    options: frozenset[str]


def unsafe_reason(mountinfo: str, path: str) -> str | None:
    """Why commits under the absolute ``path`` are not atomic; None if they are. ``mountinfo``: see proc_pid_mountinfo(5)."""
    mount = _holding(mountinfo, path)
    if mount is None:
        return None
    where = f"{mount.point} is mounted as {mount.kind}"
    kind = "fuse" if mount.kind.startswith("fuse.") else mount.kind
    if kind in _REFUSED and not _has_global_locks(mount):
        return f"{where}: {_REFUSED[kind]}"
    if mount.kind in ("nfs", "nfs4"):
        local = mount.options & {"nolock", "local_lock=all", "local_lock=flock"}
        if local:
            return f"{where} with {sorted(local)[0]}: its locks hold on one machine only"
    if mount.kind == "lustre" and "localflock" in mount.options:
        return f"{where} with localflock: its locks hold on one machine only"
    return None


def _has_global_locks(mount: _Mount) -> bool:
    """Whether the configuration of a BeeGFS client, which the options of its mount name, makes locks exclude other machines."""
    file = next((option.partition("=")[2] for option in mount.options if option.startswith("cfgFile=")), "")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return mount.kind == "beegfs" and re.search(r"(?m)^\s*tuneUseGlobalFileLocks\s*=\s*(true|1)\s*$", text) is not None


def refuse_unsafe(path: str) -> None:
    """Raise ``UnsafeStore`` if locks under the absolute ``path`` are known not to work. Without /proc nothing is known."""
    reason = unsafe_reason(_mountinfo(), path)
    if reason is not None:
        raise UnsafeStore(reason, subject=path, remedy=_REMEDY)


def kind_of(device: int) -> str | None:
    """The kind of the file system with this number, such as "ext4"; None if it is not known."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in _mounts(_mountinfo()) if mount.device == number), None)


def _mountinfo() -> str:
    try:
        return MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _holding(mountinfo: str, path: str) -> _Mount | None:
    # Of the mount points above the path the deepest holds it; of two on one point the later one covers the earlier.
    above = [m for m in _mounts(mountinfo) if m.point == "/" or path == m.point or path.startswith(m.point + "/")]
    return max(reversed(above), key=lambda mount: len(mount.point), default=None)


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        mine, dash, file_system = line.partition(" - ")
        left, right = mine.split(" "), file_system.split(" ")
        if not dash or len(left) < 6 or len(right) < 3:
            continue
        options = frozenset(left[5].split(",")) | frozenset(right[2].split(","))
        yield _Mount(left[2], _unescaped(left[4]), right[0], options)


def _unescaped(text: str) -> str:
    # The kernel writes space, tab, newline and backslash as three octal digits.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
