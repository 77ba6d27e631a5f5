"""Where an optional library is missing, the error names the extra that installs it: in Python and on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys

missing = sys.argv.pop(1).split(",")

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def python(missing: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + code, missing, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("missing", "code", "remedy"),
    [
        ("ray", "import raystow; raystow.Checkpointer", 'pip install "raystow[train]"'),
        ("ray", "from raystow import Checkpointer", 'pip install "raystow[train]"'),
        ("ray", "import raystow.ray_train", 'pip install "raystow[train]"'),
        ("ray", "import raystow; raystow.ray_train", 'pip install "raystow[train]"'),
        ("torch", "import raystow.dcp", 'pip install "raystow[train]"'),
        ("lightning", "import raystow.lightning", 'pip install "lightning"'),
        ("transformers", "import raystow.huggingface", 'pip install "transformers"'),
    ],
)
def test_python_names_the_extra(missing: str, code: str, remedy: str) -> None:
    told = python(missing, code)
    assert told.returncode == 1
    last = told.stderr.strip().splitlines()[-1]
    assert last == f"raystow.storage.errors.MissingDependency: {missing}: this needs a library that is not installed ({remedy})"


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("ray,torch,psutil", ["demo"], "train"),
        ("ray", ["drain"], "train"),
        ("ray", ["top", "--once"], "train"),
        ("matplotlib", ["report", "{uri}"], "report"),
        ("jinja2", ["report", "{uri}"], "report"),
    ],
)
def test_a_command_names_the_extra(missing: str, command: list[str], extra: str, tmp_path: Path) -> None:
    words = [word.format(uri=tmp_path) for word in command]
    told = python(missing, "from raystow.orchestrator.cli import main; main()", *words)
    assert told.returncode == 1, told
    assert "Traceback" not in told.stderr
    assert f'try: pip install "raystow[{extra}]"' in told.stderr


def test_it_is_an_import_error_too() -> None:
    code = "import json\ntry:\n    import raystow.ray_train\nexcept ImportError as error:\n    print(json.dumps(error.subject))"
    assert json.loads(python("ray", code).stdout) == "ray"
