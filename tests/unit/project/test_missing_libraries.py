"""If an optional library is missing, the error names the extra that installs it, in Python and on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raystow.storage import extras
from raystow.storage.errors import Unsupported

GOLDEN = Path(__file__).parents[2] / "compat" / "golden"

WITHOUT = """
import contextlib, importlib, io, json, sys

missing, cases = json.loads(sys.argv[1])

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from raystow.cli import main

def messages(case):
    if isinstance(case, str):
        try:
            exec(case)
        except ImportError as error:
            return f"{type(error).__name__}: {error}"
    sys.argv[1:] = case
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            main()
        except SystemExit as ended:
            return f"{ended.code}: {printed.getvalue()}"

print(json.dumps([messages(case) for case in cases]))
"""


def messages(missing: list[str], cases: list[str | list[str]], *, folder: Path | None = None) -> list[str]:
    """Return the error that each piece of Python raises, and the output of each command, in a process without these libraries.
    ``folder``: the process's."""
    command = [sys.executable, "-c", WITHOUT, json.dumps([missing, cases])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    texts: list[str] = json.loads(done.stdout)
    return texts


RAY = (
    "ray",
    ["import raystow; raystow.Checkpointer", "from raystow import Checkpointer", "import raystow.ray_train"],
    'pip install "raystow[train]"',
)
TORCH = "torch", ["import raystow.dcp", "import raystow; raystow.dcp"], 'pip install "raystow[train]"'
SIGNATURES = (
    "cryptography",
    [f"import raystow; raystow.open({str(GOLDEN)!r}, trusted_keys='pyproject.toml')"],
    'pip install "raystow[signatures]"',
)
LIGHTNING = "lightning", ["import raystow.lightning"], 'pip install "raystow[lightning]"'
TRANSFORMERS = "transformers", ["import raystow.huggingface"], 'pip install "raystow[huggingface]"'


@pytest.mark.parametrize("together", [[TORCH, SIGNATURES], [RAY], [LIGHTNING, TRANSFORMERS]])
def test_python_names_the_extra(together: list[tuple[str, list[str | list[str]], str]]) -> None:
    texts = messages([missing for missing, _, _ in together], [case for _, cases, _ in together for case in cases])
    assert texts == [
        f"MissingDependency: {missing}: this needs a library that is not installed ({remedy})"
        for missing, cases, remedy in together
        for _ in cases
    ]


def test_a_command_names_the_extra(tmp_path: Path) -> None:
    commands = {
        f"keygen {tmp_path / 'key'}": "signatures",
        "demo": "train",
        "drain": "train",
        "top --once": "train",
        f"report {tmp_path}": "report",
    }
    earlier = tmp_path / "raystow-demo" / "events"
    earlier.mkdir(parents=True)
    (earlier / "0.jsonl").touch()
    missing = ["ray", "torch", "psutil", "jinja2", "plotly", "cryptography"]
    texts = messages(missing, [command.split() for command in commands], folder=tmp_path)
    for (command, extra), text in zip(commands.items(), texts, strict=True):
        assert text.startswith("1: error: "), (command, text)
        assert f'try: pip install "raystow[{extra}]"' in text, (command, text)
        assert "Traceback" not in text
    assert [*earlier.iterdir()], "an earlier demo is kept"


def test_a_library_that_has_changed_names_the_tried_version() -> None:
    named = re.escape('(tried with numpy 0.9: pip install "numpy==0.9.*")')
    with (
        pytest.raises(Unsupported, match=f"^numpy .* has changed: .*absent.*{named}"),
        extras.tried("numpy", "0.9"),
    ):
        import numpy.absent  # noqa: F401
    with pytest.raises(Unsupported, match=f"ndarray has no method absent {named}"), extras.tried("numpy", "0.9"):
        extras.check_methods(np.ndarray, ("sum", "absent"))
    with pytest.raises(ModuleNotFoundError, match="absent"), extras.tried("numpy", "0.9"):
        import absent  # noqa: F401


def test_a_library_from_a_checkout_needs_no_metadata() -> None:
    with pytest.raises(Unsupported, match=r"^verlet has changed: no method"), extras.tried("verlet", "0.9"):
        raise AttributeError("no method")


READ = """
import json, sys
for library in ("torch", "ray", "cryptography"):
    sys.modules[library] = None
import raystow
from blake3 import blake3
from raystow.storage.coding import kernels
digests = []
for compiled in (kernels.library, lambda: None):
    kernels.library = compiled
    for folder, version in (("golden", 1), ("golden", 2), ("golden", 3), ("golden-deltas", 3)):
        read = raystow.open(f"{sys.argv[1]}/{folder}").version(version)
        digests.append({name: blake3(read.read(name).tobytes()).hexdigest() for name in read.tensors()})
print(json.dumps(digests))
"""


def test_versions_are_read_without_optional_libraries() -> None:
    """The compiled library and numpy alone read all codecs, transforms, dtypes, and deltas."""
    command = [sys.executable, "-c", READ, str(GOLDEN.parent)]
    compiled_and_plain = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    golden = json.loads((GOLDEN / "expected.json").read_text())
    wanted = [{name: row[2] for name, row in golden[version]["tensors"].items()} for version in ("1", "2", "3")]
    wanted.append(json.loads((GOLDEN.parent / "golden-deltas" / "expected.json").read_text())["3"])
    assert compiled_and_plain == [*wanted, *wanted]
