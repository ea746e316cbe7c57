"""ResNet-18 of torchvision on small images: SGD with momentum, cosine schedule, best checkpoint kept."""

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class RandomImages(Dataset):
    def __init__(self, count, classes=10):
        self.images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
        self.labels = torch.randint(0, classes, (count,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index].float() / 255.0 - 0.5, self.labels[index]


def main():
    trainloader = DataLoader(RandomImages(2048), batch_size=128, shuffle=True, num_workers=2)
    testloader = DataLoader(RandomImages(512), batch_size=100, shuffle=False, num_workers=2)
    net = torchvision.models.resnet18(weights=None, num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
    net.maxpool = nn.Identity()
    net = net.to(device)
    if torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    best_acc = 0.0
    for epoch in range(4):
        net.train()
        train_loss, correct, total = 0.0, 0, 0
        for inputs, targets in trainloader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            train_loss += loss.item()
            _, predicted = outputs.max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
        print(
            f"epoch {epoch}: loss {train_loss / len(trainloader):.3f} | acc {100.0 * correct / total:.3f}% ({correct}/{total})"
        )
        net.eval()
        correct, total = 0, 0
        with torch.no_grad():
            for inputs, targets in testloader:
                outputs = net(inputs.to(device))
                correct += outputs.argmax(1).eq(targets.to(device)).sum().item()
                total += targets.size(0)
        acc = 100.0 * correct / total
        if acc > best_acc:
            torch.save({"net": net.state_dict(), "acc": acc, "epoch": epoch}, "ckpt.pth")
            best_acc = acc
        scheduler.step()


if __name__ == "__main__":
    main()
