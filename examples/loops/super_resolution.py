"""Sub-pixel super-resolution of grey patches, threefold."""

import argparse
from math import log10

import torch
from torch import nn, optim
from torch.nn import init
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="super-resolution")
parser.add_argument("--upscale_factor", type=int, default=3)
parser.add_argument("--batchSize", type=int, default=64)
parser.add_argument("--nEpochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--cuda", action="store_true", default=True)
parser.add_argument("--threads", type=int, default=2)
opt = parser.parse_args()
if opt.cuda and not torch.cuda.is_available():
    raise SystemExit("No GPU found, please run without --cuda")
device = torch.device("cuda" if opt.cuda else "cpu")


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 64, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(64, 64, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(64, 32, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(32, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for conv in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(conv.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        x = self.relu(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))
        return self.pixel_shuffle(self.conv4(x))


size = 85
large = size * opt.upscale_factor
train_set = TensorDataset(torch.rand(256, 1, size, size), torch.rand(256, 1, large, large))
test_set = TensorDataset(torch.rand(20, 1, size, size), torch.rand(20, 1, large, large))
training_data_loader = DataLoader(train_set, num_workers=opt.threads, batch_size=opt.batchSize, shuffle=True)
testing_data_loader = DataLoader(test_set, num_workers=opt.threads, batch_size=10, shuffle=False)
model = Net(upscale_factor=opt.upscale_factor).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=opt.lr)


def train(epoch):
    epoch_loss = 0
    for iteration, (low, high) in enumerate(training_data_loader, 1):
        low, high = low.to(device), high.to(device)
        optimizer.zero_grad()
        loss = criterion(model(low), high)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        print(f"===> epoch[{epoch}]({iteration}/{len(training_data_loader)}): loss: {loss.item():.4f}")
    print(f"===> epoch {epoch} complete: avg. loss: {epoch_loss / len(training_data_loader):.4f}")


def test():
    avg_psnr = 0
    with torch.no_grad():
        for low, high in testing_data_loader:
            mse = criterion(model(low.to(device)), high.to(device))
            avg_psnr += 10 * log10(1 / mse.item())
    print(f"===> avg. PSNR: {avg_psnr / len(testing_data_loader):.4f} dB")


for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
    test()
    torch.save(model, f"model_epoch_{epoch}.pth")
