"""Save a training state and get it back, bit for bit. No GPU needed; Ray runs on this machine.

    python examples/save_and_restore.py [URI]

``URI``: s3://bucket/prefix or a folder; without one, a temporary folder.
"""

import sys
import tempfile

import ray
import torch

import raystow

uri = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="raystow-")
ray.init(log_to_driver=False)  # on the cluster of this machine, or on one of its own

model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 1024)).sum().backward()
optimizer.step()

with raystow.Checkpointer(uri) as checkpointer:
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 1}
    pending = checkpointer.save(state, step=1, metrics={"loss": 2.5})  # returns at once
    checkpointer.fence()  # from here on the tensors may change
    saved = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    print("durable:", pending.result(timeout=60))

    version = checkpointer.restore_latest(into=state)  # in place: the model has its weights back
    assert version is not None  # it is None where nothing was ever saved
    print(f"restored version {version.id}, step {version.step}:", "same bits" if model.weight.equal(saved) else "DIFFERENT")
