"""Trains the translator; its model and data are in a package beside this script."""

import torch
from config import Config
from seq.data import PAD, loaders
from seq.model import Translator
from torch import nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def evaluate(model, loader, loss_fn):
    model.eval()
    losses = 0
    with torch.no_grad():
        for source, target in loader:
            source, target = source.to(DEVICE), target.to(DEVICE)
            logits = model(source, target[:, :-1])
            losses += loss_fn(logits.reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1)).item()
    return losses / len(list(loader))


def main():
    torch.manual_seed(0)
    config = Config()
    train_loader, valid_loader = loaders(config)
    model = Translator(config).to(DEVICE)
    loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, betas=(0.9, 0.98), eps=1e-9)
    for epoch in range(1, config.epochs + 1):
        model.train()
        losses = 0
        for source, target in train_loader:
            source, target = source.to(DEVICE), target.to(DEVICE)
            logits = model(source, target[:, :-1])
            optimizer.zero_grad()
            loss = loss_fn(logits.reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            losses += loss.item()
        print(
            f"Epoch: {epoch}, train loss: {losses / len(train_loader):.3f}, val loss: {evaluate(model, valid_loader, loss_fn):.3f}"
        )


if __name__ == "__main__":
    main()
