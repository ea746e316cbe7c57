"""Finetuning a vision transformer of timm with bfloat16 autocast, label smoothing and a warm-up schedule."""

import timm
import torch
from torch.utils.data import DataLoader, Dataset


class FakeFood(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        torch.manual_seed(index)
        return torch.rand(3, 224, 224), index % 101


def accuracy(output, target, topk=(1, 5)):
    maxk = max(topk)
    _, pred = output.topk(maxk, 1, True, True)
    correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
    return [correct[:k].reshape(-1).float().sum(0) * 100.0 / target.size(0) for k in topk]


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = timm.create_model("vit_base_patch16_224", pretrained=False, num_classes=101, drop_path_rate=0.1)
    model = model.to(device)
    print(f"parameters: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M")
    loader = DataLoader(FakeFood(), batch_size=32, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(2):
        model.train()
        for step, (images, labels) in enumerate(loader):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output = model(images)
                loss = criterion(output, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            acc1, acc5 = accuracy(output, labels)
            print(
                f"epoch {epoch} step {step} loss {loss:.4f} acc@1 {acc1.item():.2f} acc@5 {acc5.item():.2f} lr {scheduler.get_last_lr()[0]:.2e}"
            )
    torch.save(model.state_dict(), "vit_food.pt")


if __name__ == "__main__":
    main()
