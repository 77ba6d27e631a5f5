"""Draw the image of the README: run ``raystow demo`` in a terminal of 80 columns and draw its final screen.

    python tools/record_demo.py docs/images/demo.svg

The output is not edited: a terminal emulator (pyte) interprets what the demo writes to a pseudo terminal, and rich draws the
result. Takes as long as the demo.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, ROWS = 80, 120
"""Rows of the terminal: enough that nothing scrolls; empty rows are not drawn."""

_NAMES = {"brown": "yellow", "brightbrown": "bright_yellow"}
"""Colour name in pyte -> name in rich, where they differ."""


def main() -> int:
    """Record and draw; return the demo's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path, help="the picture to write")
    parser.add_argument("--store", default=str(Path(tempfile.gettempdir()) / "raystow-demo"), help="the folder of the demo")
    parser.add_argument("--keep", action="store_true", help="keep that folder after a success")
    arguments = parser.parse_args()
    command = ["raystow", "demo", "--store", arguments.store]
    screen, code = record([sys.executable, "-m", *command])
    if code:  # the folder stays: it has the logs, or the demo has refused it because it is not the demo's
        sys.stderr.write("\n".join(line.rstrip() for line in screen.display).rstrip() + "\n")
        return code
    arguments.svg.parent.mkdir(parents=True, exist_ok=True)
    arguments.svg.write_text(draw([Text("$ " + " ".join(command), Style(bold=True)), *lines(screen)]))
    if not arguments.keep:
        shutil.rmtree(arguments.store, ignore_errors=True)
    return 0


def record(command: list[str]) -> tuple[pyte.Screen, int]:
    """Run ``command``; return its final screen and exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**plain, "TERM": "xterm-256color"}, start_new_session=True
    )
    os.close(theirs)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    try:
        while data := _read(ours):
            stream.feed(data)
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        code = process.wait()
        os.close(ours)
    return screen, code


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # on Linux: the other end is closed
        return b""


def lines(screen: pyte.Screen) -> Iterator[Text]:
    """Yield the rows of a screen with their styles, up to the last row that is not empty."""
    last = max((row for row, text in enumerate(screen.display) if text.strip()), default=-1)
    for row in range(last + 1):
        line = Text()
        for style, cells in groupby((screen.buffer[row][column] for column in range(COLUMNS)), key=_style):
            line.append("".join(cell.data for cell in cells), style)
        line.rstrip()
        yield line


def _style(cell: Any) -> Style:
    return Style(color=_colour(cell.fg), bold=cell.bold, italic=cell.italics)


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    return _NAMES.get(name, name.replace("bright", "bright_") if name.startswith("bright") else _hex(name))


def _hex(name: str) -> str:
    return f"#{name}" if len(name) == 6 and all(digit in "0123456789abcdefABCDEF" for digit in name) else name


def draw(text: list[Text]) -> str:
    """Return an SVG of a terminal that shows these lines."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in text:
            console.print(line, soft_wrap=True)
        svg = console.export_svg(title="raystow demo", theme=MONOKAI, unique_id="demo")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no remote font


if __name__ == "__main__":
    sys.exit(main())
