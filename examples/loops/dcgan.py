"""DCGAN: a generator and a discriminator of convolutions, trained in turns with two optimisers."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

batch_size, nz, ngf, ndf, nc = 128, 100, 64, 64, 3
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


def up(inputs, outputs, stride, padding):
    conv = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU(True)]


def down(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True)]


netG = nn.Sequential(
    *up(nz, ngf * 8, 1, 0),
    *up(ngf * 8, ngf * 4, 2, 1),
    *up(ngf * 4, ngf * 2, 2, 1),
    *up(ngf * 2, ngf, 2, 1),
    nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netD = nn.Sequential(
    nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    *down(ndf, ndf * 2),
    *down(ndf * 2, ndf * 4),
    *down(ndf * 4, ndf * 8),
    nn.Conv2d(ndf * 8, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
).to(device)
netG.apply(weights_init)
netD.apply(weights_init)

criterion = nn.BCELoss()
fixed_noise = torch.randn(64, nz, 1, 1, device=device)
real_label, fake_label = 1.0, 0.0
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
dataloader = DataLoader(TensorDataset(torch.randn(1024, 3, 64, 64)), batch_size=batch_size, shuffle=True, num_workers=2)

G_losses, D_losses = [], []
for epoch in range(2):
    for i, data in enumerate(dataloader, 0):
        netD.zero_grad()
        real = data[0].to(device)
        label = torch.full((real.size(0),), real_label, dtype=torch.float, device=device)
        output = netD(real).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(real.size(0), nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()
        if i % 4 == 0:
            print(
                f"[{epoch}][{i}/{len(dataloader)}] D {errD.item():.4f} G {errG.item():.4f} D(x) {D_x:.4f} D(G(z)) {D_G_z2:.4f}"
            )
        G_losses.append(errG.item())
        D_losses.append(errD.item())
    with torch.no_grad():
        grid = netG(fixed_noise).detach().cpu()
