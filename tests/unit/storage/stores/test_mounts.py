"""The file systems that may have a repository, determined from the text of /proc/self/mountinfo."""

from __future__ import annotations

from pathlib import Path

import pytest

from raystow.storage.errors import UnsafeStore
from raystow.storage.stores import mounts
from raystow.storage.stores.local import LocalStore

ROOT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard"


def line(point: str, kind: str, options: str = "rw", *, optional: str = "") -> str:
    return f"40 27 0:50 / {point} rw,relatime {optional}- {kind} server:/export {options}"


NFS = "rw,vers=4.2,rsize=1048576,hard,proto=tcp,clientaddr=10.0.0.2,local_lock=none,addr=10.0.0.1"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ext4", "rw"),
        ("xfs", "rw"),
        ("tmpfs", "rw"),
        ("overlay", "rw,lowerdir=/a"),
        ("ceph", "rw"),
        ("lustre", "rw,flock"),
        ("lustre", "rw"),
        ("nfs", "rw,vers=3,local_lock=none"),
        ("nfs4", NFS),
        ("nfs4", NFS.replace("local_lock=none", "local_lock=posix")),
        ("fuseblk", "rw"),
    ],
)
def test_a_safe_file_system_is_accepted(kind: str, options: str) -> None:
    assert mounts.unsafe_reason(f"{ROOT}\n{line('/mnt/share', kind, options)}\n", "/mnt/share/run") is None


@pytest.mark.parametrize(
    ("setting", "safe"),
    [
        ("tuneUseGlobalFileLocks       = true", True),
        ("tuneUseGlobalFileLocks=1", True),
        ("tuneUseGlobalFileLocks = false", False),
        ("# tuneUseGlobalFileLocks = true", False),
        ("tuneUseGlobalAppendLocks = true", False),
    ],
)
def test_beegfs_needs_locks_of_all_its_clients(tmp_path: Path, setting: str, safe: bool) -> None:
    (tmp_path / "client.conf").write_text(f"logLevel = 3\n{setting}\ntuneRemoteFSync = true\n")
    mount = line("/mnt/share", "beegfs", f"rw,cfgFile={tmp_path}/client.conf")
    assert (mounts.unsafe_reason(f"{ROOT}\n{mount}\n", "/mnt/share/run") is None) == safe


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("nfs", "rw,vers=3,nolock,local_lock=all", "local_lock=all"),
        ("nfs", "rw,vers=3,nolock", "nolock"),
        ("nfs4", NFS.replace("local_lock=none", "local_lock=all"), "local_lock=all"),
        ("nfs4", NFS.replace("local_lock=none", "local_lock=flock"), "local_lock=flock"),
        ("lustre", "rw,localflock", "localflock"),
        ("cifs", "rw", "SMB"),
        ("smb3", "rw", "SMB"),
        ("smbfs", "rw", "SMB"),
        ("9p", "rw,trans=virtio", "one machine"),
        ("virtiofs", "rw", "one machine"),
        ("beegfs", "rw,cfgFile=/etc/beegfs/beegfs-client.conf", "one machine"),
        ("afs", "rw", "AFS"),
        ("vboxsf", "rw", "virtual machine"),
        ("fuse", "rw", "FUSE"),
        ("fuse.s3fs", "rw", "FUSE"),
        ("fuse.juicefs", "rw", "FUSE"),
        ("fuse.sshfs", "rw", "FUSE"),
    ],
)
def test_an_unsafe_file_system_is_refused_with_a_reason(kind: str, options: str, reason: str) -> None:
    said = mounts.unsafe_reason(f"{ROOT}\n{line('/mnt/share', kind, options)}\n", "/mnt/share/run")
    assert said is not None
    assert reason in said
    assert "/mnt/share is mounted as " + kind in said


def test_the_deepest_mount_is_used() -> None:
    text = "\n".join([line("/a/b", "nfs4", NFS), ROOT, line("/a", "cifs"), line("/a/bb", "9p")])
    assert mounts.unsafe_reason(text, "/a/b/run") is None
    assert mounts.unsafe_reason(text, "/a/b") is None
    assert mounts.unsafe_reason(text, "/a/c") is not None
    assert mounts.unsafe_reason(text, "/a/bb/run") is not None
    assert mounts.unsafe_reason(text, "/ab") is None


def test_a_later_mount_hides_an_earlier_one() -> None:
    assert mounts.unsafe_reason("\n".join([line("/a", "cifs"), line("/a", "ext4")]), "/a/run") is None
    assert mounts.unsafe_reason("\n".join([line("/a", "ext4"), line("/a", "cifs")]), "/a/run") is not None


def test_escapes_and_optional_fields_are_parsed() -> None:
    text = "\n".join(["", "not a line", "1 2 3 - ", line(r"/my\040share\134x", "cifs", optional="shared:1 master:2 "), ROOT])
    assert mounts.unsafe_reason(text, "/my share\\x/run") is not None
    assert mounts.unsafe_reason(text, "/my") is None
    assert mounts.unsafe_reason("", "/my") is None


def test_an_unsafe_mount_refuses_commits_but_not_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"{ROOT}\n{line(str(tmp_path), 'fuse.s3fs')}\n")
    monkeypatch.setattr(mounts, "MOUNTINFO", table)
    store = LocalStore(str(tmp_path / "run"))
    store.put("versions/x", [b"x"])
    assert store.get("versions/x", max_bytes=1) == b"x"
    with pytest.raises(UnsafeStore, match=r"fuse\.s3fs.*keep the repository"):
        store.put_if("root.json", b"x", None)
    assert [info.key for info in store.list("")] == ["versions/x"]
