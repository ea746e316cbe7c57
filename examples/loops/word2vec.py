"""Skip-gram with negative sampling; embedding tables with sparse gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class SkipGrams(Dataset):
    def __init__(self, words=60_000, pairs=40_000, negatives=10):
        self.words, self.pairs, self.negatives = words, pairs, negatives

    def __len__(self):
        return self.pairs

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randint(0, self.words, (2 + self.negatives,), generator=generator)
        return drawn[0], drawn[1], drawn[2:]


class SkipGram(nn.Module):
    def __init__(self, words, dim):
        super().__init__()
        self.u = nn.Embedding(words, dim, sparse=True)
        self.v = nn.Embedding(words, dim, sparse=True)
        nn.init.uniform_(self.u.weight.data, -1.0 / dim, 1.0 / dim)
        nn.init.constant_(self.v.weight.data, 0)

    def forward(self, centre, context, negative):
        u, v, n = self.u(centre), self.v(context), self.v(negative)
        score = -F.logsigmoid(torch.clamp(torch.sum(u * v, dim=1), max=10, min=-10))
        others = torch.clamp(torch.bmm(n, u.unsqueeze(2)).squeeze(), max=10, min=-10)
        return torch.mean(score - torch.sum(F.logsigmoid(-others), dim=1))


def main():
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    data = SkipGrams()
    loader = DataLoader(data, batch_size=512, shuffle=True, num_workers=0)
    model = SkipGram(data.words, 128)
    if use_cuda:
        model.cuda()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.001)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    running_loss = 0.0
    for i, (centre, context, negative) in enumerate(loader):
        loss = model(centre.to(device), context.to(device), negative.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        running_loss = running_loss * 0.9 + loss.item() * 0.1
        if i > 0 and i % 20 == 0:
            print(" Loss: " + str(running_loss))
    torch.save(model.u.weight.data.cpu(), "vectors.pt")


if __name__ == "__main__":
    main()
