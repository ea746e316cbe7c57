"""A two-layer bidirectional LSTM over padded texts, with packed sequences."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 25_000
device = "cuda" if torch.cuda.is_available() else "cpu"


class Reviews(Dataset):
    def __init__(self, count=2000):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(40, 250, (count,), generator=generator)
        self.texts = [torch.randint(2, VOCABULARY, (int(n),), generator=generator) for n in lengths]
        self.labels = torch.randint(0, 2, (count,), generator=generator).float()

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], self.labels[index]


def collate(batch):
    texts, labels = zip(*batch, strict=True)
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence(texts, batch_first=True), lengths, torch.stack(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 100, padding_idx=0)
        self.lstm = nn.LSTM(100, 256, num_layers=2, bidirectional=True, dropout=0.5, batch_first=True)
        self.fc = nn.Linear(512, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, text, lengths):
        embedded = self.dropout(self.embedding(text))
        packed = pack_padded_sequence(embedded, lengths.to("cpu"), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.fc(self.dropout(torch.cat((hidden[-2], hidden[-1]), dim=1))).squeeze(1)


def binary_accuracy(predictions, labels):
    return (torch.round(torch.sigmoid(predictions)) == labels).float().mean()


if __name__ == "__main__":
    model = Classifier().to(device)
    print(f"The model has {sum(p.numel() for p in model.parameters() if p.requires_grad):,} trainable parameters")
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.BCEWithLogitsLoss().to(device)
    loader = DataLoader(Reviews(), batch_size=64, shuffle=True, collate_fn=collate)
    for epoch in range(3):
        model.train()
        epoch_loss, epoch_acc = 0.0, 0.0
        for text, lengths, labels in loader:
            text, labels = text.to(device), labels.to(device)
            optimizer.zero_grad()
            predictions = model(text, lengths)
            loss = criterion(predictions, labels)
            acc = binary_accuracy(predictions, labels)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
            epoch_acc += acc.item()
        print(f"epoch {epoch + 1:02}: loss {epoch_loss / len(loader):.3f}, accuracy {epoch_acc / len(loader) * 100:.2f}%")
