"""Ratings as products of user and item factors, trained with large batches on the GPU numbered 0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Factors(nn.Module):
    def __init__(self, users, items, rank=64):
        super().__init__()
        self.user, self.item = nn.Embedding(users, rank), nn.Embedding(items, rank)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.tensor(3.5))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, user, item):
        dot = (self.user(user) * self.item(item)).sum(dim=1)
        return dot + self.user_bias(user).squeeze(-1) + self.item_bias(item).squeeze(-1) + self.mean


def rmse(model, loader, device):
    model.eval()
    squared, count = 0.0, 0
    with torch.no_grad():
        for user, item, rating in loader:
            error = model(user.to(device), item.to(device)) - rating.to(device)
            squared += float(error.pow(2).sum())
            count += len(rating)
    return (squared / count) ** 0.5


def main():
    device = 0
    torch.manual_seed(0)
    users, items, ratings = 138_000, 27_000, 400_000
    data = TensorDataset(torch.randint(users, (ratings,)), torch.randint(items, (ratings,)), torch.rand(ratings) * 4 + 1)
    train, test = torch.utils.data.random_split(data, [0.9, 0.1])
    train_loader = DataLoader(train, batch_size=16384, shuffle=True)
    test_loader = DataLoader(test, batch_size=65536)
    model = Factors(users, items).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-6)
    for epoch in range(2):
        model.train()
        running = torch.zeros((), device=device)
        for user, item, rating in train_loader:
            user, item, rating = user.to(device), item.to(device), rating.to(device)
            loss = nn.functional.mse_loss(model(user, item), rating)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        print(f"epoch {epoch}: train {running / len(train_loader)}, test RMSE {rmse(model, test_loader, device):.4f}")


if __name__ == "__main__":
    main()
