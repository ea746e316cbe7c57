"""A recommender with bags of categories, dot interactions and two MLPs, in the manner of DLRM."""

import argparse

import numpy as np
import torch
from torch import nn


class DLRM(nn.Module):
    def __init__(self, rows, dim, bottom, top):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum") for n in rows)
        self.bottom, self.top = self.mlp(bottom, nn.ReLU()), self.mlp(top, nn.Sigmoid())

    @staticmethod
    def mlp(sizes, last):
        layers = []
        for i, (n, m) in enumerate(zip(sizes, sizes[1:], strict=False)):
            linear = nn.Linear(n, m)
            weight = np.random.normal(0.0, np.sqrt(2 / (m + n)), size=(m, n)).astype(np.float32)
            linear.weight.data = torch.tensor(weight, requires_grad=True)
            layers += [linear, last if i == len(sizes) - 2 else nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        looked_up = [table(indices[i], offsets[i]) for i, table in enumerate(self.tables)]
        stacked = torch.cat([x, *looked_up], dim=1).view(x.size(0), -1, x.size(1))
        dots = torch.bmm(stacked, stacked.transpose(1, 2))
        _, n, _ = dots.shape
        li = torch.tensor([i for i in range(n) for _ in range(i)])
        lj = torch.tensor([j for i in range(n) for j in range(i)])
        return self.top(torch.cat([x, dots[:, li, lj]], dim=1))


def batches(count, size, rows, pooling):
    for _ in range(count):
        indices = [torch.randint(0, n, (size * pooling,)) for n in rows]
        offsets = [torch.arange(0, size * pooling, pooling) for _ in rows]
        yield torch.rand(size, 13), indices, offsets, torch.randint(0, 2, (size, 1)).float()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a recommender")
    parser.add_argument("--mini-batch-size", type=int, default=2048)
    parser.add_argument("--num-batches", type=int, default=20)
    parser.add_argument("--embedding-dim", type=int, default=64)
    parser.add_argument("--print-freq", type=int, default=5)
    args = parser.parse_args()
    np.random.seed(123)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = [100_000, 50_000, 20_000, 200_000, 1000, 300, 40_000, 120_000]
    pairs = (len(rows) + 1) * len(rows) // 2
    model = DLRM(rows, args.embedding_dim, [13, 512, 256, args.embedding_dim], [args.embedding_dim + pairs, 512, 256, 1])
    model = model.to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    loss_fn = nn.BCELoss(reduction="mean")
    total_loss, total_accu, samples = 0.0, 0, 0
    for j, (dense, indices, offsets, target) in enumerate(batches(args.num_batches, args.mini_batch_size, rows, 10)):
        output = model(dense.to(device), [i.to(device) for i in indices], [o.to(device) for o in offsets])
        loss = loss_fn(output, target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.detach().cpu().numpy() * target.shape[0]
        total_accu += np.sum((np.round(output.detach().cpu().numpy(), 0) == target.numpy()).astype(np.uint8))
        samples += target.shape[0]
        if (j + 1) % args.print_freq == 0:
            print(
                f"Finished training it {j + 1}/{args.num_batches}, loss {total_loss / samples:.6f}, accuracy {total_accu / samples:.3f}"
            )
