"""Faster R-CNN of torchvision finetuned on boxes of two classes; pictures of one batch have different numbers of boxes."""

import math
import sys

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import fasterrcnn_resnet50_fpn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor


class Pedestrians(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        boxes = torch.rand(1 + index % 4, 4) * 200
        boxes[:, 2:] += boxes[:, :2] + 20
        return torch.rand(3, 480, 640), {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64), "image_id": index}


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


def get_model(num_classes):
    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    in_features = model.roi_heads.box_predictor.cls_score.in_features
    model.roi_heads.box_predictor = FastRCNNPredictor(in_features, num_classes)
    return model


def train_one_epoch(model, optimizer, loader, device, epoch, print_freq):
    model.train()
    for i, (images, targets) in enumerate(loader):
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            print(loss_dict)
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if i % print_freq == 0:
            print(
                f"Epoch [{epoch}][{i}] loss {loss_value:.4f} " + " ".join(f"{k} {v.item():.4f}" for k, v in loss_dict.items())
            )


def main():
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    loader = DataLoader(Pedestrians(), batch_size=2, shuffle=True, collate_fn=collate_fn)
    model = get_model(num_classes=2)
    model.to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.005, momentum=0.9, weight_decay=0.0005)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    for epoch in range(2):
        train_one_epoch(model, optimizer, loader, device, epoch, print_freq=4)
        lr_scheduler.step()


if __name__ == "__main__":
    main()
