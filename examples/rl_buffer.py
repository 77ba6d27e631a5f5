"""Policy gradient with an experience buffer in an actor: trainer and buffer are saved as one version.

python examples/rl_buffer.py /tmp/rl-run 60 33     # is killed after step 33
python examples/rl_buffer.py /tmp/rl-run 60        # continues: each sample is trained once, as if nothing had happened
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import nn

import raystow

FEATURES, ACTIONS, BATCH, EVERY = 6, 3, 64, 10
BEST = np.random.default_rng(1).normal(size=(ACTIONS, FEATURES))  # the environment rewards the action with the largest product


class Buffer:
    """Makes samples by random actions, ahead of the training: rows of features, action and reward."""

    def __init__(self, uri: str) -> None:
        self.part = raystow.Part(uri, "buffer")
        self.random = np.random.default_rng(7)
        self.first = 0  # the number of the first of the samples
        self.samples: NDArray[np.float64] = np.zeros((0, FEATURES + 2))
        self.restored, self.lock = threading.Event(), threading.Lock()

    def follow(self) -> None:
        """Restore what the trainer restores; then save this part with each of its saves."""
        state: dict[str, Any] = {"generator": raystow.AsSaved(), "first": 0, "samples": raystow.AsSaved()}
        if self.part.restore(into=state) is not None:
            self.random.bit_generator.state = state["generator"]
            self.first, self.samples = state["first"], state["samples"]
        self.restored.set()
        step = 0
        while True:
            begun = self.part.wait_for(step)
            with self.lock:  # the trainer may be ahead of its save, but says how many samples it had then
                drawn = int(str(begun.cut["drawn"]))
                self.first, self.samples = drawn, self.samples[drawn - self.first :]
                state = {"generator": self.random.bit_generator.state, "first": self.first, "samples": self.samples}
                self.part.save(state, step=begun.step)
            step = begun.step + 1

    def take(self, first: int, count: int) -> NDArray[np.float64]:
        """Samples by number."""
        self.restored.wait()
        with self.lock:
            while self.first + len(self.samples) < first + 2 * count:
                features = self.random.normal(size=FEATURES)
                action = self.random.integers(ACTIONS)
                reward = float(action == np.argmax(BEST @ features))
                self.samples = np.vstack([self.samples, [*features, action, reward]])
            return self.samples[first - self.first :][:count]


def main(uri: str, total: int, killed_after: int) -> None:
    """Train up to step ``total``, and end like a killed process after a step."""
    torch.manual_seed(0)
    policy = nn.Linear(FEATURES, ACTIONS)
    adam = torch.optim.Adam(policy.parameters(), lr=0.02)
    progress = {"drawn": 0}

    def cut() -> Mapping[str, object]:
        return dict(progress)

    run = raystow.Run(uri, every=EVERY)
    run.shared(policy=policy, adam=adam, progress=progress)
    run.part("buffer", cut=cut)
    actor: Any = ray.remote(num_cpus=0, max_concurrency=4)(Buffer)
    buffer = actor.remote(run.checkpointer.uri)
    buffer.follow.remote()
    for step in run.steps(total):
        batch = torch.tensor(ray.get(buffer.take.remote(progress["drawn"], BATCH)), dtype=torch.float32)
        progress["drawn"] += BATCH
        features, actions, rewards = batch[:, :FEATURES], batch[:, FEATURES].long(), batch[:, FEATURES + 1]
        chosen = policy(features).softmax(1).gather(1, actions[:, None])[:, 0]
        loss = -(ACTIONS * chosen * (rewards - rewards.mean())).mean()  # actions were chosen with probability 1 / ACTIONS
        adam.zero_grad()
        loss.backward()
        adam.step()
        run.report(reward=float((ACTIONS * chosen * rewards).mean().detach()))
        if step == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in policy.parameters())
    print(f"step {total}, {progress['drawn']} samples, weights {hashlib.sha256(bits).hexdigest()[:16]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
