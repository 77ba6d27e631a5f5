"""Save a training state and restore it, bit for bit, without a GPU and with Ray on this machine.

    python examples/save_and_restore.py [URI]

``URI``: ``s3://bucket/prefix`` or a folder. Default: a temporary folder.
"""

import sys
import tempfile

import ray
import torch

import raystow

uri = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="raystow-")
ray.init(log_to_driver=False)  # connects to the cluster of this machine, or starts one

model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 1024)).sum().backward()
optimizer.step()

with raystow.Checkpointer(uri) as checkpointer:
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 1}
    pending = checkpointer.save(state, step=1, metrics={"loss": 2.5})  # returns after planning
    checkpointer.fence()  # now the tensors may change
    saved = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    print("durable:", pending.result(timeout=60))

    version = checkpointer.restore_latest(into=state)  # fills the model's tensors in place
    assert version is not None  # None if there is no version
    print(f"restored version {version.id}, step {version.step}:", "same bits" if model.weight.equal(saved) else "DIFFERENT")
