"""Options for the checkpoints of verl. With this folder in PYTHONPATH on every node:

python -m verl.trainer.main_ppo ... actor_rollout_ref.model.external_lib=verl_checkpoints
"""

from __future__ import annotations

import raystow
import raystow.verl

raystow.verl.configure(
    retention=raystow.Policy(keep_last=2, keep_every=1000),
    compression=raystow.Compression(delta=0),
    on_failure="warn",  # the training continues if a save fails
)
