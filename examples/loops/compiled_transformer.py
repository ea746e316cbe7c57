"""A transformer encoder over event sequences, compiled with torch.compile."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self, vocab=8000, width=512, layers=8, heads=8, length=256, classes=20):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x) + self.positions).mean(dim=1))


def main():
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = TensorDataset(torch.randint(0, 8000, (1024, 256)), torch.randint(0, 20, (1024,)))
    loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True, pin_memory=True)
    model = Encoder().to(device)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(2):
        total = 0.0
        for events, labels in loader:
            events, labels = events.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(compiled(events), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
