"""Translation with a GRU encoder and an attending GRU decoder that is fed word by word."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_LENGTH, HIDDEN, SOS = 12, 256, 0


class Encoder(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embedding = nn.Embedding(words, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens):
        return self.gru(self.dropout(self.embedding(tokens)))


class Decoder(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embedding = nn.Embedding(words, HIDDEN)
        self.query, self.key, self.score = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
        self.gru = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, words)

    def forward(self, encoded, hidden, target=None):
        token = torch.empty(encoded.size(0), 1, dtype=torch.long, device=device).fill_(SOS)
        outputs = []
        for i in range(MAX_LENGTH):
            query = hidden.permute(1, 0, 2)
            scores = self.score(torch.tanh(self.query(query) + self.key(encoded))).squeeze(2).unsqueeze(1)
            context = torch.bmm(F.softmax(scores, dim=-1), encoded)
            output, hidden = self.gru(torch.cat((self.embedding(token), context), dim=2), hidden)
            outputs.append(self.out(output))
            token = target[:, i].unsqueeze(1) if target is not None else outputs[-1].topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


def train_epoch(loader, encoder, decoder, optimizers, criterion):
    total_loss = 0
    for source, target in loader:
        source, target = source.to(device), target.to(device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        encoded, hidden = encoder(source)
        outputs = decoder(encoded, hidden, target if random.random() < 0.7 else None)
        loss = criterion(outputs.view(-1, outputs.size(-1)), target.view(-1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        total_loss += loss.item()
    return total_loss / len(loader)


def main():
    pairs = TensorDataset(torch.randint(0, 4500, (2000, MAX_LENGTH)), torch.randint(0, 2900, (2000, MAX_LENGTH)))
    loader = DataLoader(pairs, sampler=RandomSampler(pairs), batch_size=32)
    encoder, decoder = Encoder(4500).to(device), Decoder(2900).to(device)
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.001) for module in (encoder, decoder)]
    criterion = nn.NLLLoss()
    for epoch in range(1, 4):
        print(f"epoch {epoch}: {train_epoch(loader, encoder, decoder, optimizers, criterion):.4f}")


main()
