"""Forecasts of many series with an encoder-decoder transformer and quantile losses, on the GPU numbered 0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

QUANTILES = (0.1, 0.5, 0.9)


class Series(Dataset):
    def __init__(self, count=2048, past=168, future=24, channels=8):
        time = torch.arange(past + future).float()
        phase = torch.rand(count, 1, channels) * 6.28
        self.values = torch.sin(time[None, :, None] / 24 * 6.28 + phase) + 0.1 * torch.randn(count, past + future, channels)
        self.past = past

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index, : self.past], self.values[index, self.past :]


class Forecaster(nn.Module):
    def __init__(self, channels=8, width=256):
        super().__init__()
        self.inputs, self.query = nn.Linear(channels, width), nn.Parameter(torch.randn(1, 24, width) * 0.02)
        self.transformer = nn.Transformer(width, 8, 4, 4, 1024, 0.1, batch_first=True)
        self.head = nn.Linear(width, channels * len(QUANTILES))
        self.channels = channels

    def forward(self, past):
        mean, scale = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-5
        mask = nn.Transformer.generate_square_subsequent_mask(24, device=past.device)
        out = self.transformer(self.inputs((past - mean) / scale), self.query.expand(past.size(0), -1, -1), tgt_mask=mask)
        out = self.head(out).unflatten(-1, (self.channels, len(QUANTILES)))
        return out * scale.unsqueeze(-1) + mean.unsqueeze(-1)


def quantile_loss(forecast, target):
    errors = target.unsqueeze(-1) - forecast
    quantiles = torch.tensor(QUANTILES, device=target.device)
    return torch.maximum(quantiles * errors, (quantiles - 1) * errors).mean()


def run_epoch(model, loader, optimizer=None):
    model.train(optimizer is not None)
    total = 0.0
    with torch.set_grad_enabled(optimizer is not None):
        for past, future in loader:
            past, future = past.to(0), future.to(0)
            loss = quantile_loss(model(past), future)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
            total += loss.item() * len(past)
    return total / len(loader.dataset)


if __name__ == "__main__":
    torch.cuda.manual_seed_all(7)
    train_loader = DataLoader(Series(), batch_size=128, shuffle=True)
    valid_loader = DataLoader(Series(512), batch_size=256)
    model = Forecaster().to(0)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    best = float("inf")
    for epoch in range(3):
        train_loss, valid_loss = run_epoch(model, train_loader, optimizer), run_epoch(model, valid_loader)
        scheduler.step(valid_loss)
        print(f"epoch {epoch}: train {train_loss:.4f} valid {valid_loss:.4f} lr {optimizer.param_groups[0]['lr']:.1e}")
        if valid_loss < best:
            best = valid_loss
            torch.save(model.state_dict(), "best.pt")
