"""A physics-informed network for Burgers' equation: derivatives of the output by its inputs are part of the loss."""

import numpy as np
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
np.random.seed(1234)


class PINN(nn.Module):
    def __init__(self, width=128, depth=8):
        super().__init__()
        sizes = [2, *[width] * depth, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        for layer in self.layers:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x, t):
        h = torch.cat([x, t], dim=1)
        for layer in self.layers[:-1]:
            h = torch.tanh(layer(h))
        return self.layers[-1](h)


def residual(model, x, t, nu=0.01 / np.pi):
    u = model(x, t)
    u_t = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
    return u_t + u * u_x - nu * u_xx


def column(values, grad=False):
    return torch.tensor(values, dtype=torch.float32, requires_grad=grad, device=device).view(-1, 1)


x_f, t_f = column(np.random.uniform(-1, 1, 20000), grad=True), column(np.random.uniform(0, 1, 20000), grad=True)
x_0 = np.random.uniform(-1, 1, 200)
x_u, t_u, u = column(x_0), column(np.zeros(200)), column(-np.sin(np.pi * x_0))
model = PINN().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
for it in range(20):
    optimizer.zero_grad()
    loss_u = torch.mean((u - model(x_u, t_u)) ** 2)
    loss_f = torch.mean(residual(model, x_f, t_f) ** 2)
    loss = loss_u + loss_f
    loss.backward()
    optimizer.step()
    scheduler.step()
    if it % 5 == 0:
        print("It: %d, Loss: %.3e, Loss_u: %.3e, Loss_f: %.3e" % (it, loss.item(), loss_u.item(), loss_f.item()))
