"""An image takes the style of another: its pixels are optimised with L-BFGS over features of VGG-19."""

import torch
import torch.nn.functional as F
import torchvision
from torch import nn, optim

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_default_device(device)
size = 512
content_img, style_img = torch.rand(1, 3, size, size), torch.rand(1, 3, size, size)
cnn = torchvision.models.vgg19(weights=None).features.eval()
STYLE, CONTENT = {0, 5, 10, 19, 28}, {21}


def gram_matrix(x):
    a, b, c, d = x.size()
    features = x.view(a * b, c * d)
    return torch.mm(features, features.t()).div(a * b * c * d)


class Features(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.ReLU(inplace=False) if isinstance(layer, nn.ReLU) else layer for layer in layers)
        self.mean = torch.tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
        self.std = torch.tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)

    def forward(self, x):
        x, style, content = (x - self.mean) / self.std, [], []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i in STYLE:
                style.append(gram_matrix(x))
            if i in CONTENT:
                content.append(x)
            if i == max(STYLE):
                break
        return style, content


def run_style_transfer(num_steps=60, style_weight=1000000, content_weight=1):
    model = Features(cnn)
    model.requires_grad_(False)
    style_targets = [t.detach() for t in model(style_img)[0]]
    content_targets = [t.detach() for t in model(content_img)[1]]
    input_img = content_img.clone().requires_grad_(True)
    optimizer = optim.LBFGS([input_img])
    run = [0]
    while run[0] <= num_steps:

        def closure():
            with torch.no_grad():
                input_img.clamp_(0, 1)
            optimizer.zero_grad()
            style, content = model(input_img)
            style_score = sum(F.mse_loss(a, b) for a, b in zip(style, style_targets, strict=True)) * style_weight
            content_score = sum(F.mse_loss(a, b) for a, b in zip(content, content_targets, strict=True)) * content_weight
            loss = style_score + content_score
            loss.backward()
            run[0] += 1
            if run[0] % 20 == 0:
                print(f"run {run}: style loss {style_score.item():4f} content loss {content_score.item():4f}")
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        input_img.clamp_(0, 1)
    return input_img


if __name__ == "__main__":
    output = run_style_transfer()
    torch.save(output.cpu(), "stylised.pt")
