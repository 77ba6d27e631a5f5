"""Reading needs neither Ray, torch nor a GPU, nor the slow pandas: tested in a process that cannot import them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from helpers.local_cluster import LocalCluster

READER = """
import json, sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "torch", "boto3", "obstore", "pandas"):
            raise ImportError(f"{name} is forbidden here")

sys.meta_path.insert(0, Forbidden())
import numpy as np
import raystow

repository = raystow.open(sys.argv[1])
version = repository.latest()
part = version.read("model.w", index=(slice(0, 2), 3))
into = {"model": {"w": np.zeros((6, 4), np.float32), "h": None}, "step": None, "names": [None]}
raystow.restore(sys.argv[1], into=into)
raystow.restore(repository.version("step:41"), into)
repository.verify(version)
print(json.dumps({
    "versions": [v.step for v in repository.versions()],
    "tensors": {name: [info.dtype, list(info.shape), info.nbytes] for name, info in version.tensors().items()},
    "part": part.tolist(),
    "whole": into["model"]["w"].tolist(),
    "half": [str(into["model"]["h"].dtype), into["model"]["h"].astype("float32").tolist()],
    "step": into["step"],
    "names": into["names"],
}))
"""


def test_open_read_restore_and_verify_without_ray_and_torch(tmp_path: Path) -> None:
    w, h = torch.arange(24.0).reshape(6, 4), torch.tensor([1.5, -2.0]).bfloat16()
    with LocalCluster(str(tmp_path)) as cluster:
        cluster.save({"model": {"w": w, "h": h}, "step": 41, "names": ["x"]}, step=41)
    done = subprocess.run([sys.executable, "-c", READER, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"] == [41]
    assert found["tensors"] == {"model.h": ["bfloat16", [2], 4], "model.w": ["float32", [6, 4], 96]}
    assert np.array_equal(found["part"], w[0:2, 3].numpy())
    assert np.array_equal(found["whole"], w.numpy())
    assert found["half"] == ["bfloat16", [1.5, -2.0]]
    assert (found["step"], found["names"]) == (41, ["x"])
