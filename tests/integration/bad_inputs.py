"""Invalid inputs for the command line and the API: damaged repositories, invalid files, unusual strings and addresses."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import typer
from helpers.local_cluster import LocalCluster
from hypothesis import strategies as st
from typer.testing import CliRunner

import raystow
from raystow.cli.app import build
from raystow.cli.exit_codes import EXIT_CODES

APP = build()
COMMANDS = dict(typer.main.get_command(APP).commands)  # type: ignore[attr-defined]
OTHERS = {"demo", "top", "drain", "doctor"}
"""Commands that use a Ray cluster or measure the machine."""

STRANGE = [
    *("", " ", "0", "-1", "1.5", "1e999", "nan", "inf", "9" * 400, "٣", "1h", "-5s", "1e309h", "5GB", "0B", "1e400GiB", "1/0"),
    *("latest", "step:1", "step:", "step:9999999999999999999", "1", "2", "3", "99", "best", "a/b", "..", "*", "[", "--", "\\"),
    *("naïve", "a\udcffb", "\udcff", "a\nb", "a\x1b[31m", "\u202e", "x" * 300, "x" * 5000, "%s", "{0}", "None", "a,b", ":"),
]
PLACES = [
    *("good", "no root", "bad root", "text root", "root is a folder", "no marker", "bad marker", "old marker", "bad record"),
    *("no record", "bad fragment", "no fragment", "bad pack", "no pack", "short pack", "special", "empty", "file", "nowhere"),
]
ADDRESSES = [
    *(
        "s3://",
        "s3://b",
        "s3://key:secret@bucket/x",
        "s3://bucket/../x",
        "s3:/bucket",
        "gs://bucket/x",
        "az://container/x",
        "http://host/x",
        "memory://",
    ),
    *(
        "memory://bad-inputs",
        "memory://a/b",
        "s3://bucket/\udcff",
        "file://host/path",
        "file:///nowhere?x#y",
        "file:",
        "~no-such-user/x",
        "hf://x",
        "x\x00y",
    ),
]
FILES = [
    *("good.safetensors", "empty.safetensors", "short.safetensors", "long.safetensors", "text.safetensors", "list.safetensors"),
    *("surrogate.safetensors", "reserved.safetensors", "negative.safetensors", "huge.safetensors", "deep.safetensors"),
    *("model.safetensors.index.json", "bad.safetensors.index.json", "folder", "nothing", "loop", "key.pem", "random.bin"),
]


def make(base: Path) -> Path:
    """Write repositories with one kind of damage each, and files to import, to ``base``; return ``base``."""
    with LocalCluster(str(base / "good")) as cluster:
        for step in (1, 2):
            state = {"model": {"w": np.arange(1000, dtype=np.float32) + step}, "step": step, "e": b"x"}
            cluster.save(state, step=step, metrics={"loss": 1 / step})
    raystow.open(base / "good").pin(raystow.open(base / "good").version(1), "best")
    good = base / "good"

    def damaged(name: str, pattern: str, change: Callable[[Path], object]) -> None:
        copy = Path(shutil.copytree(good, base / name))
        for path in sorted(copy.rglob(pattern)):
            change(path)

    flip = _flipped
    damaged("no root", "root.json", Path.unlink)
    damaged("bad root", "root.json", flip)
    damaged("text root", "root.json", lambda path: path.write_bytes(b"\xff\xfe{"))
    damaged("root is a folder", "root.json", lambda path: (path.unlink(), path.mkdir()))
    damaged("no marker", "raystow.json", Path.unlink)
    damaged("bad marker", "raystow.json", lambda path: path.write_bytes(b"[" * 1000))
    damaged("old marker", "raystow.json", lambda path: path.write_text('{"format": 99}'))
    damaged("bad record", "version*.json", flip)
    damaged("no record", "version*.json", Path.unlink)
    damaged("bad fragment", "*.parquet", flip)
    damaged("no fragment", "*.parquet", Path.unlink)
    damaged("bad pack", "*.pack", flip)
    damaged("no pack", "*.pack", Path.unlink)
    damaged("short pack", "*.pack", lambda path: os.truncate(path, 10))
    damaged("special", "root.json", lambda path: (path.unlink(), path.symlink_to(path)))
    (base / "empty").mkdir()
    (base / "file").write_bytes(b"x")
    _files(base / "files")
    return base


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _files(folder: Path) -> None:
    folder.mkdir()

    def write(name: str, header: Any, body: bytes = b"\0" * 8) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (folder / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)

    def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": offsets}

    write("good", {"w": entry()})
    write("long", {"w": entry()}, b"\0" * 9)
    write("list", [1, 2])
    write("surrogate", b'{"a\\udcff": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}')
    write("reserved", {"__metadata__": {"raystow.dtypes": '{"w": 5}'}, "w": entry()})
    write("negative", {"w": entry(shape=[-2], offsets=[0, -8])})
    write("huge", {"w": entry(shape=[1 << 62, 1 << 62], offsets=[0, 1 << 126])})
    write("deep", b"[" * 100_000)
    write("text", "naïve")
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "short.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "good.safetensors", "v": "list.safetensors"}}')
    (folder / "bad.safetensors.index.json").write_text('{"weight_map": {"w": "../good.safetensors"}}')
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "key.pem").write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n")
    (folder / "random.bin").write_bytes(bytes(range(256)))


places = st.sampled_from([f"@{name}" for name in PLACES] + ADDRESSES)
files = st.sampled_from([f"@files/{name}" for name in FILES])
texts = st.sampled_from(STRANGE) | st.text(max_size=20)
words_of = {
    "uri": st.one_of(*[places] * 8, texts),
    "source": st.one_of(files, places),
    "version": st.one_of(st.sampled_from(["1", "2", "best", "latest", "step:2"]), texts),
}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(sorted({*COMMANDS} - OTHERS)))
    words = [name]
    for param in COMMANDS[name].params:
        values = words_of.get(param.name or "", st.one_of(texts, files, places))
        if param.param_type_name == "argument":
            if param.required or draw(st.booleans()):
                count = draw(st.integers(0, 3)) if param.nargs == -1 else 1
                words += [draw(values) for _ in range(count)]
        elif draw(st.integers(0, 3)) == 0:
            words.append(draw(st.sampled_from(param.opts)))
            if not param.is_flag and draw(st.integers(0, 9)):
                words.append(draw(values))
    if draw(st.booleans()) and any("--yes" in param.opts for param in COMMANDS[name].params):
        words.append("--yes")
    return words


def check_command(base: Path, place: Path, words: list[str]) -> None:
    """Run a command on copies of the places in its words (``@name``): it must succeed or report an error of raystow."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name in {word[1:].partition("/")[0] for word in words if word.startswith("@")} & {path.name for path in base.iterdir()}:
        copy = shutil.copytree if (base / name).is_dir() else shutil.copy
        copy(base / name, place / name, **({"symlinks": True} if (base / name).is_dir() else {}))
    resolved = [str(place / word[1:]) if word.startswith("@") else word for word in words]
    result = CliRunner().invoke(APP, resolved, input="n\n", env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in EXIT_CODES
    assert "Traceback" not in result.output
    if result.exit_code not in (0, 2, 7) and "--json" not in words:
        assert "error: " in result.output or "damaged" in result.output, result.output
