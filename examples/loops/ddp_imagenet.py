"""ResNet-50 with DistributedDataParallel, started by torchrun; one process for each GPU."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class FakeImages(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(3, 224, 224), index % 1000


def reduce_mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="for each GPU")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    torch.cuda.set_device(local_rank)
    model = torchvision.models.resnet50(weights=None)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(local_rank)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    criterion = torch.nn.CrossEntropyLoss().to(local_rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    dataset = FakeImages(8 * args.batch_size * dist.get_world_size())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, num_workers=args.workers, pin_memory=True, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        end = time.time()
        for i, (images, target) in enumerate(loader):
            images = images.cuda(local_rank, non_blocking=True)
            target = target.cuda(local_rank, non_blocking=True)
            output = model(images)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean_loss = reduce_mean(loss.data)
            if i % 2 == 0 and dist.get_rank() == 0:
                print(f"Epoch: [{epoch}][{i}/{len(loader)}]\tTime {time.time() - end:6.3f}\tLoss {mean_loss.item():.4e}")
            end = time.time()
        if dist.get_rank() == 0:
            torch.save(
                {"epoch": epoch + 1, "state_dict": model.module.state_dict(), "optimizer": optimizer.state_dict()},
                "checkpoint.pth.tar",
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
