"""REINFORCE with a baseline on a cart that a policy keeps upright; episodes are stepped on the CPU."""

import math
from itertools import count

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Cart:
    """A pole on a cart, stepped with Euler's method."""

    def reset(self):
        self.state = [0.01, 0.0, 0.02, 0.0]
        return self.state

    def step(self, action):
        x, v, angle, turn = self.state
        force = 10.0 if action == 1 else -10.0
        push = (force + 0.05 * turn**2 * math.sin(angle)) / 1.1
        turning = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.5 * (4.0 / 3.0 - 0.1 * math.cos(angle) ** 2 / 1.1))
        self.state = [x + 0.02 * v, v + 0.02 * push, angle + 0.02 * turn, turn + 0.02 * turning]
        return self.state, 1.0, abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(4, 128)
        self.action_head, self.value_head = nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, x):
        x = F.relu(self.affine(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


env, model = Cart(), Policy().to(device)
optimizer = optim.Adam(model.parameters(), lr=3e-2)


def finish_episode(saved, rewards, gamma=0.99):
    returns, discounted = [], 0
    for r in reversed(rewards):
        discounted = r + gamma * discounted
        returns.insert(0, discounted)
    returns = torch.tensor(returns, device=device)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_losses, value_losses = [], []
    for (log_prob, value), target in zip(saved, returns, strict=True):
        advantage = target - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, target.unsqueeze(0)))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()


def main():
    running = 10.0
    for episode in count(1):
        state, saved, rewards = env.reset(), [], []
        for _ in range(1, 200):
            probs, value = model(torch.tensor(state, dtype=torch.float32).to(device))
            distribution = Categorical(probs)
            action = distribution.sample()
            saved.append((distribution.log_prob(action), value))
            state, reward, done = env.step(action.item())
            rewards.append(reward)
            if done:
                break
        running = 0.05 * sum(rewards) + 0.95 * running
        finish_episode(saved, rewards)
        if episode % 5 == 0:
            print(f"Episode {episode}\tlast reward: {sum(rewards):.2f}\taverage reward: {running:.2f}")
        if running > 150 or episode >= 20:
            break


if __name__ == "__main__":
    main()
