"""SimCLR: two views of every image, a projection head, and the loss over all pairs of the batch."""

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        image = torch.rand(3, 96, 96)
        return [image + 0.1 * torch.randn_like(image), image.flip(-1)], index % 10


class ResNetSimCLR(nn.Module):
    def __init__(self, out_dim=128):
        super().__init__()
        self.backbone = torchvision.models.resnet50(weights=None, num_classes=out_dim)
        width = self.backbone.fc.in_features
        self.backbone.fc = nn.Sequential(nn.Linear(width, width), nn.ReLU(), self.backbone.fc)

    def forward(self, x):
        return self.backbone(x)


class SimCLR:
    def __init__(self, model, optimizer, scheduler, device, temperature=0.07, n_views=2):
        self.model, self.optimizer, self.scheduler, self.device = model.to(device), optimizer, scheduler, device
        self.temperature, self.n_views = temperature, n_views
        self.criterion = nn.CrossEntropyLoss().to(device)

    def info_nce_loss(self, features):
        batch = features.shape[0] // self.n_views
        labels = torch.cat([torch.arange(batch) for _ in range(self.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().to(self.device)
        features = F.normalize(features, dim=1)
        similarity = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool).to(self.device)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity = similarity[~mask].view(similarity.shape[0], -1)
        positives = similarity[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        return logits / self.temperature, torch.zeros(logits.shape[0], dtype=torch.long).to(self.device)

    def train(self, loader, epochs):
        scaler = torch.amp.GradScaler("cuda")
        for epoch in range(epochs):
            for step, (images, _) in enumerate(loader):
                images = torch.cat(images, dim=0).to(self.device)
                with torch.autocast("cuda"):
                    logits, labels = self.info_nce_loss(self.model(images))
                    loss = self.criterion(logits, labels)
                self.optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()
                top1 = (logits.argmax(dim=1) == labels).float().mean()
                print(f"Epoch: {epoch}\tStep: {step}\tLoss: {loss}\tTop1 accuracy: {top1.item()}")
            if epoch >= 10:
                self.scheduler.step()


def main():
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    loader = DataLoader(TwoViews(), batch_size=256, shuffle=True, num_workers=4, pin_memory=True, drop_last=True)
    model = ResNetSimCLR()
    optimizer = torch.optim.Adam(model.parameters(), 0.0003, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader), eta_min=0, last_epoch=-1)
    with torch.cuda.device(0):
        SimCLR(model, optimizer, scheduler, device).train(loader, epochs=2)


if __name__ == "__main__":
    main()
