"""T5 of transformers on articles and summaries, with Adafactor-free bf16 weights and validation by loss."""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from transformers import T5Config, T5ForConditionalGeneration


class Articles(Dataset):
    def __init__(self, count, source=512, target=64):
        self.count, self.source, self.target = count, source, target

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        source, target = torch.randint(2, 32128, (self.source,)), torch.randint(2, 32128, (self.target,))
        mask = torch.ones(self.source, dtype=torch.long)
        mask[400:] = 0
        target[50:] = 0
        return {"source_ids": source, "source_mask": mask, "target_ids": target}


def step(model, data, device):
    labels = data["target_ids"].to(device, dtype=torch.long)
    labels[labels == 0] = -100
    ids, mask = data["source_ids"].to(device, dtype=torch.long), data["source_mask"].to(device, dtype=torch.long)
    return model(input_ids=ids, attention_mask=mask, labels=labels)[0]


def train(epoch, model, device, loader, optimizer):
    model.train()
    for i, data in enumerate(loader, 0):
        loss = step(model, data, device)
        if i % 10 == 0:
            print(f"Epoch: {epoch}, Loss: {loss.item()}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(model, device, loader):
    model.eval()
    losses = []
    with torch.no_grad():
        losses = [step(model, data, device).cpu() for data in loader]
    return torch.stack(losses).mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--train_epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).to(device)
    train_set, val_set = Articles(160), Articles(32)
    train_loader = DataLoader(train_set, batch_size=args.train_batch_size, sampler=RandomSampler(train_set))
    val_loader = DataLoader(val_set, batch_size=args.train_batch_size, sampler=SequentialSampler(val_set))
    optimizer = torch.optim.Adam(params=model.parameters(), lr=args.learning_rate)
    for epoch in range(args.train_epochs):
        train(epoch, model, device, train_loader, optimizer)
        print("validation loss", validate(model, device, val_loader))
