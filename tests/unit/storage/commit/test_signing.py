"""Signatures: the versions that a reader with keys accepts or refuses, and the refusals of a coordinator without the right
key.
"""

from __future__ import annotations

import os
import pickle  # noqa: TID251
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from helpers.builders import memory_repository, overwrite_root, whole, write
from helpers.scripted_store import script

import raystow
from raystow.storage.coding.digest import stored_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, RaystowError, StateError, StoreUnavailable, Untrusted
from raystow.storage.format import key_files, keys, records
from raystow.storage.format.signature import Signer
from raystow.storage.repository import Repository, create_repository, open_repository
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.versions.version import Version

ARRAY = np.arange(5.0)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(key_files.SIGNING_KEY, raising=False)
    monkeypatch.delenv(key_files.TRUSTED_KEYS, raising=False)


@pytest.fixture
def uri() -> str:
    return f"memory://signing-{SYSTEM.token()}"


def new_signer(path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    """Return a signer whose key is in a file, as a coordinator creates it."""
    key_files.write_pair(path)
    with monkeypatch.context() as patch:
        patch.setenv(key_files.SIGNING_KEY, str(path))
        signer = key_files.signer()
    assert signer is not None
    return signer


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    return new_signer(tmp_path / "ours", monkeypatch)


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    return new_signer(tmp_path / "theirs", monkeypatch)


@pytest.fixture
def trusted(tmp_path: Path, ours: Signer) -> Path:
    """Return the path of the file with the public key of ``ours``."""
    return tmp_path / "ours.pub"


def write_one_array(repository: Repository, signer: Signer | None = None, value: float = 0.0) -> Version:
    return write(Committer(repository, SYSTEM.token(), signer), {"w": whole(ARRAY + value)})


def reads(version: Version) -> bool:
    return bool(np.array_equal(version.read("w"), ARRAY))


def put_signature(version: Version, repository: Repository, data: bytes) -> None:
    repository.store.put(keys.signature(version.id, version.attempt), [data])


def signature(version: Version, repository: Repository) -> bytes:
    return repository.store.get(keys.signature(version.id, version.attempt), max_bytes=1 << 20)


def test_a_signed_version_is_read_with_and_without_keys(uri, ours, trusted, monkeypatch):
    repository = create_repository(uri)
    write_one_array(repository, ours)
    for found in (open_repository(uri), raystow.open(uri, trusted_keys=trusted)):
        assert reads(found.latest())
        found.verify(found.latest())
    monkeypatch.setenv(key_files.TRUSTED_KEYS, str(trusted))
    assert reads(open_repository(uri).latest())


def test_a_reader_with_keys_refuses_an_unsigned_version(uri, trusted, monkeypatch):
    version = write_one_array(create_repository(uri))
    assert reads(open_repository(uri).latest())
    found = open_repository(uri, trusted_keys=trusted).latest()
    assert found.step == 0  # the root has the step, so a listing shows it
    for look in (lambda: found.read("w"), lambda: found.metrics, lambda: found.tensors(), lambda: found.values()):
        with pytest.raises(Untrusted, match=rf"{version.attempt}/version\.sig: version 1 is not signed"):
            look()
    monkeypatch.setenv(key_files.TRUSTED_KEYS, str(trusted))
    with pytest.raises(Untrusted):
        open_repository(uri).latest().read("w")


def test_a_directly_constructed_version_uses_the_environment(uri, trusted, monkeypatch):
    repository = create_repository(uri)
    version = Version(repository.store, write_one_array(repository).entry, repository.id)
    monkeypatch.setenv(key_files.TRUSTED_KEYS, str(trusted))
    with pytest.raises(Untrusted):
        version.read("w")


def test_a_reader_with_keys_refuses_the_signature_of_others(uri, theirs, trusted):
    write_one_array(create_repository(uri), theirs)
    with pytest.raises(Untrusted, match=theirs.public.id):
        open_repository(uri, trusted_keys=trusted).latest().read("w")


def test_a_signature_is_valid_for_one_version_only(uri, ours, trusted):
    repository = open_repository(create_repository(uri).uri, trusted_keys=trusted)
    first, second = write_one_array(repository, ours), write_one_array(repository, ours, 1.0)
    put_signature(first, repository, signature(second, repository))
    with pytest.raises(Untrusted, match="not that of key"):
        repository.version(1).read("w")
    digest = bytes.fromhex(first.entry.digest)
    for other in (("another", 1, first.attempt), (repository.id, 2, first.attempt), (repository.id, 1, second.attempt)):
        put_signature(first, repository, ours.sign(*other, digest))
        with pytest.raises(Untrusted, match="not that of key"):
            repository.version(1).read("w")
    put_signature(first, repository, ours.sign(repository.id, 1, first.attempt, digest))
    assert reads(repository.version(1))


def test_the_signature_equals_the_test_vector_of_the_spec():
    signer = Signer(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    digest = bytes.fromhex("be553e8982d361a44ff05708f12160391f938eb97feef310b1a9eb8eea6fc18a")
    data = signer.sign("0e334fb068ef37765c133bf665c2c68c", 1, "65c5e0a080b634de", digest)
    fields = records.load(data, "version.sig")
    vector = (
        "9a4cfd6909e7cfafad493e31d2027984bd3c4775259dcde0538ae6b61986f1ea"
        "86b081c3c6a39ff0d33acaacf83a9505692a3646c24e4ee6e6e3d3732faf8a01"
    )
    assert (fields["key"], fields["algorithm"], fields["signature"]) == ("98ba85304ac639f0", "ed25519", vector)


def test_a_forged_key_id_is_refused(uri, ours, theirs, trusted):
    repository = open_repository(create_repository(uri).uri, trusted_keys=trusted)
    version = write_one_array(repository, ours)
    forged = theirs.sign(repository.id, version.id, version.attempt, bytes.fromhex(version.entry.digest))
    fields = {**records.load(forged, "version.sig"), "key": ours.public.id}
    del fields["digest"]
    put_signature(version, repository, records.dump(fields, "version.sig"))
    with pytest.raises(Untrusted, match="not that of key"):
        repository.latest().read("w")


def test_a_change_of_any_byte_of_a_signature_is_detected(uri, ours, trusted):
    repository = open_repository(create_repository(uri).uri, trusted_keys=trusted)
    version = write_one_array(repository, ours)
    data = signature(version, repository)
    for at in range(len(data)):
        put_signature(version, repository, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(RaystowError):
            _ = repository.latest().record
    put_signature(version, repository, data)
    assert reads(repository.latest())


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "none"},
        {"signature": ""},
        {"signature": "0" * 128},
        {"signature": "Z" * 128},
        {"signature": 5},
        {"key": None},
        {"key": "x" * 3000},
    ],
)
def test_an_invalid_signature_field_raises_raystow_error(uri, ours, trusted, change):
    repository = open_repository(create_repository(uri).uri, trusted_keys=trusted)
    version = write_one_array(repository, ours)
    fields = {**records.load(signature(version, repository), "version.sig"), **change}
    del fields["digest"]
    put_signature(version, repository, records.dump(fields, "version.sig"))
    with pytest.raises(RaystowError):
        _ = repository.latest().record


def rewritten(repository: Repository, **change: object) -> None:
    """Replace the newest record as a writer without a key could: each digest above the record is updated."""
    entry = repository.root().versions[-1]
    fields = records.load(repository.store.get(keys.record(entry.id, entry.attempt), max_bytes=1 << 20), "version.json")
    fields.pop("digest")
    data = records.dump({**fields, **change}, "version.json")
    repository.store.put(keys.record(entry.id, entry.attempt), [data])
    forged = replace(entry, digest=stored_digest(data).hex(), size=len(data))
    overwrite_root(repository, lambda root: replace(root, versions=(*root.versions[:-1], forged)))


def test_a_forged_record_with_valid_digests_is_refused(uri, ours, trusted):
    repository = create_repository(uri)
    write_one_array(repository, ours)
    rewritten(repository, metrics={"loss": 0.5})
    assert open_repository(uri).latest().metrics == {"loss": 0.5}
    with pytest.raises(Untrusted, match="not that of key"):
        _ = open_repository(uri, trusted_keys=trusted).latest().metrics


def test_a_step_changed_in_the_root_is_detected(uri, ours, trusted):
    repository = open_repository(create_repository(uri).uri, trusted_keys=trusted)
    write_one_array(repository, ours)
    overwrite_root(repository, lambda root: replace(root, versions=(replace(root.versions[0], step=7),)))
    with pytest.raises(Damaged, match="the root says step 7"):
        repository.latest().read("w")


def test_no_version_is_committed_without_its_signature(uri, ours):
    repository = memory_repository()
    committer = Committer(repository, "me", ours)
    put = repository.store.put

    def failing(key: str, parts: object) -> None:
        if key.endswith("version.sig"):
            raise StoreUnavailable("no answer", subject=key)
        put(key, parts)

    script(repository.store, put=failing)
    with pytest.raises(StoreUnavailable):
        write(committer, {"w": whole(ARRAY)})
    assert repository.versions() == []


def test_a_repository_created_with_a_key_requires_the_key(uri, ours, theirs):
    repository = create_repository(uri, signer=ours)
    write_one_array(repository, ours)
    again = create_repository(uri)
    for signer in (None, theirs):
        with pytest.raises(Untrusted, match=ours.public.id):
            Committer(again, "other", signer)
    assert again.root().epoch == 1  # the refused committer has not increased the epoch
    assert reads(again.latest())


def test_a_locally_trusted_key_may_not_sign_for_a_repository(uri, tmp_path, ours, theirs, monkeypatch):
    create_repository(uri, signer=ours)
    monkeypatch.setenv(key_files.TRUSTED_KEYS, str(tmp_path / "theirs.pub"))
    with pytest.raises(Untrusted, match=ours.public.id):
        Committer(open_repository(uri), "me", theirs)


def test_readers_without_keys_use_the_keys_of_the_repository(uri, ours):
    repository = create_repository(uri, signer=ours)
    write_one_array(repository, ours)
    rewritten(repository, metrics={"loss": 0.5})
    with pytest.raises(Untrusted):
        _ = open_repository(uri).latest().metrics


def test_a_forged_marker_is_detected_only_with_own_keys(uri, ours, theirs, trusted):
    repository = create_repository(uri, signer=ours)
    version = write_one_array(repository, ours)
    marker = {"repository": repository.id, "created": 0, "signed_by": [theirs.public.raw.hex()]}
    repository.store.put(keys.MARKER, [records.dump(marker, keys.MARKER)])
    rewritten(repository, metrics={"loss": 0.5})
    digest = bytes.fromhex(repository.root().versions[0].digest)
    put_signature(version, repository, theirs.sign(repository.id, 1, version.attempt, digest))
    assert open_repository(uri).latest().metrics == {"loss": 0.5}
    with pytest.raises(Untrusted, match=theirs.public.id):
        _ = open_repository(uri, trusted_keys=trusted).latest().metrics


def test_keys_trusted_at_creation_may_sign(uri, tmp_path, ours, theirs, monkeypatch):
    monkeypatch.setenv(key_files.TRUSTED_KEYS, str(tmp_path))  # the folder has both public keys
    create_repository(uri, signer=ours)
    monkeypatch.delenv(key_files.TRUSTED_KEYS)
    write_one_array(create_repository(uri), theirs)
    assert reads(open_repository(uri).latest())


@pytest.mark.parametrize("signed_by", [[], "x", None, [5], ["ab"], ["A" * 64], {"a": 1}])
def test_a_marker_with_invalid_keys_is_damaged(uri, signed_by):
    repository = create_repository(uri)
    marker = {"repository": repository.id, "created": 0, "signed_by": signed_by}
    repository.store.put(keys.MARKER, [records.dump(marker, keys.MARKER)])
    with pytest.raises(Damaged, match="signed_by"):
        open_repository(uri)


def test_a_writer_must_sign_with_a_key_that_it_trusts(uri, ours, theirs, trusted, monkeypatch):
    made = create_repository(uri)
    monkeypatch.setenv(key_files.TRUSTED_KEYS, str(trusted))
    for signer in (None, theirs):
        with pytest.raises(Untrusted, match=ours.public.id):
            create_repository(f"{uri}-new", signer=signer)
        with pytest.raises(Untrusted, match=ours.public.id):
            Committer(create_repository(uri), "me", signer)
    with pytest.raises(raystow.NotARepository):
        open_repository(f"{uri}-new")
    assert made.root().epoch == 0
    write_one_array(create_repository(uri), ours)


def test_a_pickled_version_keeps_its_trusted_keys(tmp_path, trusted):
    uri = str(tmp_path / "run")
    write_one_array(create_repository(uri))
    sent = pickle.loads(pickle.dumps(open_repository(uri, trusted_keys=trusted).latest()))
    with pytest.raises(Untrusted):
        sent.read("w")


def test_a_private_key_is_never_exposed(tmp_path, ours, monkeypatch):
    secret = (tmp_path / "ours").read_text().splitlines()[1]
    assert secret not in repr(ours) + str(ours)
    with pytest.raises(TypeError, match="does not leave its process"):
        pickle.dumps(ours)
    (tmp_path / "ours").chmod(0o640)
    monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "ours"))
    with pytest.raises(StateError, match=r"ours: others than its owner can use this private key: its mode is 0640") as caught:
        key_files.signer()
    assert secret not in str(caught.value)


@pytest.mark.parametrize("mode", [0o610, 0o601, 0o620, 0o604])
def test_a_key_file_accessible_to_other_users_is_refused(tmp_path, ours, mode, monkeypatch):
    (tmp_path / "ours").chmod(mode)
    monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "ours"))
    with pytest.raises(StateError, match=f"{mode:04o}"):
        key_files.signer()


def test_a_private_key_of_another_user_is_refused(tmp_path, ours, monkeypatch, system_calls):
    """Root could read it."""
    monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "ours"))
    other = (tmp_path / "ours").stat().st_uid + 1
    system_calls.replace(geteuid=lambda: other)
    with pytest.raises(StateError, match="ours: belongs to another user") as caught:
        key_files.signer()
    assert "chown" in caught.value.remedy


def private_pem(private: object, *, password: bytes = b"") -> bytes:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def test_an_invalid_signing_key_is_refused(tmp_path, monkeypatch):
    ed25519, other = Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048)
    public = ed25519.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path = tmp_path / "key"
    monkeypatch.setenv(key_files.SIGNING_KEY, str(path))
    with pytest.raises(StateError, match="key cannot be read"):
        key_files.signer()
    for data in (b"", b"\xff" * 100, public, private_pem(other), private_pem(ed25519, password=b"x"), private_pem(ed25519)[:60]):
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(StateError, match="no Ed25519 private key"):
            key_files.signer()
    path.write_bytes(private_pem(ed25519))
    assert key_files.signer() is not None


def test_a_key_that_cannot_be_written_leaves_no_file(tmp_path):
    """The file is too large for the process, as on a full disk. Then the same command works."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from raystow.storage.format.key_files import write_pair\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "write_pair(Path(sys.argv[1]))"
    )
    for most in (50, 115):  # bytes: the private key takes 119, the public one 113
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "key"), str(most)], capture_output=True, text=True)
        assert "File too large" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_trusted_keys_come_from_one_file_or_a_folder(tmp_path, ours, theirs):
    both = tmp_path / "both.pem"
    both.write_bytes(b"# ours\n" + (tmp_path / "ours.pub").read_bytes() + b"\n" + (tmp_path / "theirs.pub").read_bytes())
    for place in (both, tmp_path):  # the folder also has private keys, which are ignored
        trust = key_files.trust(place)
        assert trust is not None
        assert set(trust.keys) == {ours.public, theirs.public}


@pytest.mark.parametrize("content", [None, "", "no key", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_invalid_trusted_keys_never_turn_checks_off(tmp_path, uri, content, monkeypatch):
    create_repository(uri)
    path = tmp_path / "trusted"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(key_files.TRUSTED_KEYS, str(path))
    with pytest.raises(StateError, match="trusted"):
        open_repository(uri)


def test_many_beginnings_of_keys_take_no_time(tmp_path, ours):
    """In a process with a limit of CPU seconds: as a regular expression, this took half a minute."""
    path = tmp_path / "trusted.pem"
    path.write_bytes(b"-----BEGIN A-----" * 57_000 + (tmp_path / "ours.pub").read_bytes())
    code = (
        "import resource, sys; from raystow.storage.format import key_files; key_files.trust(sys.argv[1])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF); start = int(used.ru_utime + used.ru_stime)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (start + 3, start + 3))\n"
        "print(len(key_files.trust(sys.argv[2]).keys))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "ours.pub", path], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1\n"


@pytest.mark.parametrize("folder", [False, True])
def test_a_pipe_holds_no_keys(tmp_path, folder, monkeypatch):
    """Nobody writes to it: to open it would take for ever."""
    os.mkfifo(tmp_path / "pipe.pub", 0o600)
    with pytest.raises(StateError, match=r"pipe\.pub: is no regular file"):
        key_files.trust(tmp_path if folder else tmp_path / "pipe.pub")
    monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "pipe.pub"))
    with pytest.raises(StateError, match=r"pipe\.pub: is no regular file"):
        key_files.signer()


def test_a_private_key_is_not_trusted_as_a_public_one(tmp_path, ours):
    with pytest.raises(StateError, match="private key"):
        key_files.trust(tmp_path / "ours")


def test_an_empty_key_folder_or_variable_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(StateError, match="no public key"):
        key_files.trust(tmp_path)
    for variable, look in ((key_files.TRUSTED_KEYS, key_files.trust), (key_files.SIGNING_KEY, key_files.signer)):
        monkeypatch.setenv(variable, "")
        with pytest.raises(StateError, match=f"{variable}: is set, but empty"):
            look()


def test_without_keys_cryptography_is_not_imported(tmp_path):
    write_one_array(create_repository(str(tmp_path)))
    code = (
        "import sys, raystow\n"
        f"version = raystow.open({str(tmp_path)!r}).latest()\n"
        "assert len(version.read('w')) == 5\n"
        "assert 'cryptography' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
