"""U-Net on photographs and masks: mixed precision, Dice score, a learning rate that follows the validation."""

import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")


class DoubleConv(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, channels=3, classes=2, widths=(64, 128, 256, 512, 1024)):
        super().__init__()
        self.first = DoubleConv(channels, widths[0])
        self.downs = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(a, b)) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:], strict=False))
        self.convs = nn.ModuleList(DoubleConv(2 * a, a) for a in widths[:-1])
        self.out = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        skips = [self.first(x)]
        for down in self.downs:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, conv in zip(reversed(self.ups), reversed(self.convs), strict=True):
            x, skip = up(x), skips.pop()
            dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = conv(torch.cat([skip, F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])], dim=1))
        return self.out(x)


def dice_loss(logits, target):
    probabilities = F.softmax(logits, dim=1).float()
    hot = F.one_hot(target, logits.size(1)).permute(0, 3, 1, 2).float()
    inter = 2 * (probabilities * hot).sum(dim=(-1, -2))
    return 1 - ((inter + 1e-6) / (probabilities.sum(dim=(-1, -2)) + hot.sum(dim=(-1, -2)) + 1e-6)).mean()


@torch.inference_mode()
def evaluate(net, loader, device):
    net.eval()
    score = 0
    for image, mask in loader:
        image = image.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
        score += 1 - dice_loss(net(image), mask.to(device=device, dtype=torch.long))
    net.train()
    return score / max(len(loader), 1)


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.info(f"using device {device}")
    data = TensorDataset(torch.rand(36, 3, 190, 126), torch.randint(0, 2, (36, 190, 126)))
    train_set, val_set = random_split(data, [28, 8], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_set, shuffle=True, batch_size=4, num_workers=2, pin_memory=True)
    val_loader = DataLoader(val_set, drop_last=True, batch_size=4, num_workers=2, pin_memory=True)
    model = UNet().to(memory_format=torch.channels_last).to(device=device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    scaler = torch.amp.GradScaler("cuda", enabled=True)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, 3):
        for images, masks in train_loader:
            images = images.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            masks = masks.to(device=device, dtype=torch.long)
            with torch.autocast(device.type, enabled=True):
                predicted = model(images)
                loss = criterion(predicted, masks) + dice_loss(predicted, masks)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            logging.info(f"epoch {epoch} loss {loss.item()}")
        val_score = evaluate(model, val_loader, device)
        scheduler.step(val_score)
        logging.info(f"validation Dice score: {val_score}")
