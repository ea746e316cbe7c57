"""A Siamese network that says whether two digits are the same, with a margin loss."""

import torch
import torch.nn.functional as F
import torchvision
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, count):
        self.images, self.classes = torch.rand(count, 1, 28, 28), torch.randint(0, 10, (count,))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        other = int(torch.randint(len(self.images), ()))
        return self.images[index], self.images[other], (self.classes[index] == self.classes[other]).float()


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        resnet = torchvision.models.resnet18(weights=None)
        resnet.conv1 = nn.Conv2d(1, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
        self.features = nn.Sequential(*list(resnet.children())[:-1])
        self.fc = nn.Sequential(nn.Linear(512 * 2, 256), nn.ReLU(inplace=True), nn.Linear(256, 1))
        self.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, a, b):
        a, b = (self.features(x).view(x.size(0), -1) for x in (a, b))
        return torch.sigmoid(self.fc(torch.cat((a, b), 1))).squeeze(), a, b


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for a, b, targets in loader:
            outputs, _, _ = model(a.to(device), b.to(device))
            predicted = torch.where(outputs > 0.5, 1, 0)
            correct += predicted.eq(targets.to(device).view_as(predicted)).sum().item()
    print(f"accuracy {correct}/{len(loader.dataset)}")


def main():
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    train_loader = DataLoader(Pairs(1024), batch_size=64, shuffle=True, num_workers=1, pin_memory=True)
    test_loader = DataLoader(Pairs(256), batch_size=128)
    model = SiameseNetwork().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    bce = nn.BCELoss()
    for epoch in range(1, 3):
        model.train()
        for i, (a, b, targets) in enumerate(train_loader):
            a, b, targets = a.to(device), b.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs, x, y = model(a, b)
            distance = F.pairwise_distance(x, y)
            contrast = targets * distance.pow(2) + (1 - targets) * torch.clamp(1.0 - distance, min=0.0).pow(2)
            loss = bce(outputs, targets) + 0.1 * contrast.mean()
            loss.backward()
            optimizer.step()
            if i % 10 == 0:
                print("Train Epoch: {} [{}/{}]\tLoss: {:.6f}".format(epoch, i * len(a), len(train_loader.dataset), loss.item()))
        test(model, device, test_loader)


if __name__ == "__main__":
    main()
