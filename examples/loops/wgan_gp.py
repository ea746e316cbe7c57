"""Wasserstein GAN with a gradient penalty: five steps of the critic for one of the generator."""

import argparse

import torch
from torch import autograd, nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=2)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--latent_dim", type=int, default=100)
parser.add_argument("--n_critic", type=int, default=5)
parser.add_argument("--lambda_gp", type=float, default=10)
opt = parser.parse_args()
print(opt)
cuda = bool(torch.cuda.is_available())


def block(inputs, outputs, normalize=True):
    norm = [nn.BatchNorm1d(outputs, 0.8)] if normalize else []
    return [nn.Linear(inputs, outputs), *norm, nn.LeakyReLU(0.2, inplace=True)]


generator = nn.Sequential(
    *block(opt.latent_dim, 128, normalize=False),
    *block(128, 256),
    *block(256, 512),
    *block(512, 1024),
    nn.Linear(1024, 1024),
    nn.Tanh(),
)
critic = nn.Sequential(
    nn.Linear(1024, 512),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Linear(512, 256),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Linear(256, 1),
)
if cuda:
    generator.cuda()
    critic.cuda()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor


def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1, device=real.device)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(interpolates)
    ones = torch.ones_like(scores, requires_grad=False)
    gradients = autograd.grad(scores, interpolates, ones, create_graph=True, retain_graph=True, only_inputs=True)[0]
    return ((gradients.view(gradients.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()


loader = DataLoader(TensorDataset(torch.rand(2048, 1024) * 2 - 1), batch_size=opt.batch_size, shuffle=True)
batches_done = 0
for epoch in range(opt.n_epochs):
    for i, (imgs,) in enumerate(loader):
        real = imgs.type(Tensor)
        optimizer_D.zero_grad()
        z = torch.randn(imgs.shape[0], opt.latent_dim, device=real.device)
        fake = generator(z)
        d_loss = -torch.mean(critic(real)) + torch.mean(critic(fake)) + opt.lambda_gp * gradient_penalty(real.data, fake.data)
        d_loss.backward()
        optimizer_D.step()
        optimizer_G.zero_grad()
        if i % opt.n_critic == 0:
            g_loss = -torch.mean(critic(generator(z)))
            g_loss.backward()
            optimizer_G.step()
            print(f"[epoch {epoch}/{opt.n_epochs}] [batch {i}/{len(loader)}] [D {d_loss.item():f}] [G {g_loss.item():f}]")
            batches_done += opt.n_critic
