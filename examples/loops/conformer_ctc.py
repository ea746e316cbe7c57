"""Speech recognition: log spectrograms on the GPU, a conformer, and CTC."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Utterances(Dataset):
    def __init__(self, count=96, seconds=8, rate=16000):
        self.count, self.samples = count, seconds * rate

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        length = int(torch.randint(20, 60, ()))
        return torch.randn(self.samples), torch.randint(1, 29, (length,))


def collate(batch):
    waves, texts = zip(*batch, strict=True)
    return torch.stack(waves), torch.cat(texts), torch.tensor([len(text) for text in texts])


class LogMel(nn.Module):
    def __init__(self, n_fft=400, hop=160, mels=80):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("filters", torch.rand(n_fft // 2 + 1, mels))

    def forward(self, wave):
        spectrum = torch.stft(wave, self.n_fft, self.hop, window=self.window, return_complex=True).abs().pow(2)
        return torch.log(spectrum.transpose(1, 2) @ self.filters + 1e-6)


class ConvModule(nn.Module):
    def __init__(self, width, kernel=31):
        super().__init__()
        self.norm, self.expand = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.bn, self.project = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x):
        x = F.glu(self.expand(self.norm(x).transpose(1, 2)), dim=1)
        return self.project(F.silu(self.bn(self.depthwise(x)))).transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self, width=256, heads=4, dropout=0.1):
        super().__init__()
        ff = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(dropout), nn.Linear(4 * width, width)]
        ff2 = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(dropout), nn.Linear(4 * width, width)]
        self.ff1, self.ff2 = nn.Sequential(*ff), nn.Sequential(*ff2)
        self.norm_attn, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.conv, self.norm = ConvModule(width), nn.LayerNorm(width)

    def forward(self, x):
        x = x + 0.5 * self.ff1(x)
        y = self.norm_attn(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        x = x + self.conv(x)
        return self.norm(x + 0.5 * self.ff2(x))


class Conformer(nn.Module):
    def __init__(self, mels=80, width=256, layers=12, symbols=29):
        super().__init__()
        self.features = LogMel(mels=mels)
        self.shrink = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
        self.inputs = nn.Linear(width * (mels // 4), width)
        self.blocks = nn.Sequential(*[ConformerBlock(width) for _ in range(layers)])
        self.head = nn.Linear(width, symbols)

    def forward(self, wave):
        x = self.shrink(self.features(wave).unsqueeze(1))
        x = self.inputs(x.permute(0, 2, 1, 3).flatten(2))
        return F.log_softmax(self.head(self.blocks(x)), dim=-1)


model = Conformer().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
criterion = nn.CTCLoss(blank=0, zero_infinity=True).to(device)
loader = DataLoader(Utterances(), batch_size=16, shuffle=True, collate_fn=collate, num_workers=2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=5e-4, steps_per_epoch=len(loader), epochs=2, anneal_strategy="linear"
)
for epoch in range(1, 3):
    model.train()
    for batch_idx, (waves, labels, label_lengths) in enumerate(loader):
        waves, labels = waves.to(device), labels.to(device)
        optimizer.zero_grad()
        output = model(waves).transpose(0, 1)
        input_lengths = torch.full((waves.size(0),), output.size(0), dtype=torch.long)
        loss = criterion(output, labels, input_lengths, label_lengths)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if batch_idx % 2 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(waves)}/{len(loader.dataset)}]\tLoss: {loss.item():.6f}")
