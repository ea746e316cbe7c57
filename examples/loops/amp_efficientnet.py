"""EfficientNet of torchvision in half precision with a gradient scaler and channels_last."""

import argparse
import time

import torch
import torchvision
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description="mixed-precision training")
parser.add_argument("-a", "--arch", default="efficientnet_b0")
parser.add_argument("-b", "--batch-size", default=64, type=int)
parser.add_argument("--epochs", default=1, type=int)
parser.add_argument("-p", "--print-freq", default=2, type=int)
parser.add_argument("--gpu", default=0, type=int)


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def __str__(self):
        return f"{self.name} {self.sum / max(self.count, 1):.3f}"


def main():
    args = parser.parse_args()
    print(f"=> creating model '{args.arch}'")
    model = torchvision.models.__dict__[args.arch]()
    torch.cuda.set_device(args.gpu)
    model = model.cuda(args.gpu).to(memory_format=torch.channels_last)
    criterion = torch.nn.CrossEntropyLoss().cuda(args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-5, nesterov=True)
    scaler = torch.cuda.amp.GradScaler()
    data = torchvision.datasets.FakeData(512, (3, 224, 224), 1000, torchvision.transforms.ToTensor())
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=4, pin_memory=True)
    for epoch in range(args.epochs):
        batch_time, losses, top1 = AverageMeter("Time"), AverageMeter("Loss"), AverageMeter("Acc@1")
        model.train()
        end = time.time()
        for i, (images, target) in enumerate(loader):
            images = images.cuda(args.gpu, non_blocking=True).contiguous(memory_format=torch.channels_last)
            target = target.cuda(args.gpu, non_blocking=True)
            with torch.cuda.amp.autocast():
                output = model(images)
                loss = criterion(output, target)
            losses.update(loss.item(), images.size(0))
            top1.update((output.argmax(1) == target).float().mean().item() * 100, images.size(0))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            batch_time.update(time.time() - end)
            end = time.time()
            if i % args.print_freq == 0:
                print(f"Epoch [{epoch}][{i}/{len(loader)}]\t{batch_time}\t{losses}\t{top1}")


if __name__ == "__main__":
    main()
