"""ConvNeXt of torchvision with mixup, label smoothing and an average of its weights, as in torchvision's recipes."""

import datetime
import time

import torch
import torchvision
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def mixup(images, targets, classes, alpha=0.2):
    hot = nn.functional.one_hot(targets, classes).to(images.dtype)
    share = float(torch._sample_dirichlet(torch.tensor([alpha, alpha]))[0])
    images = images.roll(1, 0).mul_(1.0 - share).add_(images.mul(share))
    return images, hot.roll(1, 0).mul_(1.0 - share).add_(hot.mul(share))


def evaluate(model, criterion, loader, device):
    model.eval()
    correct = count = 0
    with torch.inference_mode():
        for image, target in loader:
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            output = model(image)
            criterion(output, target)
            correct += output.argmax(1).eq(target).sum().item()
            count += len(target)
    print(f"Acc@1 {100 * correct / count:.3f}")


def main():
    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    classes = 1000
    train = TensorDataset(torch.rand(192, 3, 224, 224), torch.randint(0, classes, (192,)))
    loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=2, pin_memory=True)
    test_loader = DataLoader(train, batch_size=64)
    model = torchvision.models.convnext_tiny(weights=None, num_classes=classes)
    model.to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    norms = [p for n, p in model.named_parameters() if p.ndim <= 1]
    others = [p for n, p in model.named_parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    scaler = torch.amp.GradScaler("cuda")
    ema = AveragedModel(model, device=device, multi_avg_fn=get_ema_multi_avg_fn(0.9999), use_buffers=True)
    start = time.time()
    for epoch in range(2):
        model.train()
        for i, (image, target) in enumerate(loader):
            image, target = image.to(device), target.to(device)
            image, target = mixup(image, target, classes)
            with torch.amp.autocast("cuda"):
                output = model(image)
                loss = criterion(output, target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if i % 2 == 0:
                ema.update_parameters(model)
                print(f"Epoch: [{epoch}] loss {loss.item():.4f} lr {optimizer.param_groups[0]['lr']}")
        scheduler.step()
        evaluate(ema, criterion, test_loader, device)
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "model.pth"
        )
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start))}")


if __name__ == "__main__":
    main()
