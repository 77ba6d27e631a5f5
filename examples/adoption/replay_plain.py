"""Train an agent that walks to the right: two optimizers, and a replay buffer that grows. It starts anew after each failure.

python examples/adoption/replay_plain.py [STEPS]
"""

import sys

import torch
from torch import nn

STEPS = int(sys.argv[-1]) if sys.argv[-1].isdecimal() else 60


class ReplayBuffer:
    """All transitions so far."""

    def __init__(self) -> None:
        self.rows = torch.empty(0, 6)  # position, velocity, action, reward, next position, next velocity

    def add(self, row: torch.Tensor) -> None:
        """Append a transition."""
        self.rows = torch.cat([self.rows, row[None]])

    def sample(self, size: int) -> torch.Tensor:
        """Draw transitions."""
        return self.rows[torch.randint(len(self.rows), (size,))]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the transitions."""
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the transitions."""
        self.rows = state["rows"]


torch.set_num_threads(1)
torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1), nn.Tanh())
critic = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3)
buffer = ReplayBuffer()
world = {"place": torch.zeros(2)}  # position and velocity of the agent

for step in range(1, STEPS + 1):
    with torch.no_grad():
        action = actor(world["place"]) + 0.3 * torch.randn(1)
    velocity = 0.9 * world["place"][1:] + 0.1 * action
    place = torch.cat([world["place"][:1] + velocity, velocity])
    buffer.add(torch.cat([world["place"], action, velocity, place]))
    world["place"].copy_(place)

    rows = buffer.sample(32)
    with torch.no_grad():
        goal = rows[:, 3:4] + 0.95 * critic(torch.cat([rows[:, 4:], actor(rows[:, 4:])], 1))
    critic_loss = (critic(rows[:, :3]) - goal).square().mean()
    critic_loss.backward()
    critic_optimizer.step()
    critic_optimizer.zero_grad()
    actor_loss = -critic(torch.cat([rows[:, :2], actor(rows[:, :2])], 1)).mean()
    actor_loss.backward()
    actor_optimizer.step()
    actor_optimizer.zero_grad()
    critic_optimizer.zero_grad()
    print(f"step {step}: {len(buffer.rows)} transitions, loss {critic_loss.item():.6f}", flush=True)
