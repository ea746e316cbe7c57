"""Graph convolutions over a citation-like graph; messages are gathered and added up with index_add."""

import torch
import torch.nn.functional as F
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x, edge_index, norm):
        source, target = edge_index
        x = self.linear(x)
        out = torch.zeros_like(x)
        out.index_add_(0, target, x[source] * norm.unsqueeze(-1))
        return out + self.bias


class GCN(nn.Module):
    def __init__(self, inputs, hidden, classes, layers=3):
        super().__init__()
        sizes = [inputs, *[hidden] * (layers - 1), classes]
        self.convs = nn.ModuleList(GraphConv(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(layers - 1))

    def forward(self, x, edge_index, norm):
        for conv, bn in zip(self.convs[:-1], self.norms, strict=True):
            x = F.dropout(F.relu(bn(conv(x, edge_index, norm))), p=0.5, training=self.training)
        return self.convs[-1](x, edge_index, norm)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
nodes, edges, features, classes = 169_343, 1_166_243, 128, 40
x = torch.randn(nodes, features).to(device)
edge_index = torch.randint(0, nodes, (2, edges)).to(device)
y = torch.randint(0, classes, (nodes,)).to(device)
train_idx = torch.randperm(nodes)[:90_941].to(device)
valid_idx = torch.randperm(nodes)[:29_799].to(device)

degree = torch.zeros(nodes, device=device).scatter_add_(0, edge_index[1], torch.ones(edges, device=device)).clamp(min=1)
norm = degree[edge_index[0]].pow(-0.5) * degree[edge_index[1]].pow(-0.5)

model = GCN(features, 256, classes).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(x, edge_index, norm)[train_idx]
    loss = F.cross_entropy(out, y[train_idx])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    predicted = model(x, edge_index, norm).argmax(dim=-1)
    return int((predicted[valid_idx] == y[valid_idx]).sum()) / valid_idx.numel()


for epoch in range(1, 6):
    loss = train()
    valid_acc = test()
    print(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Valid: {valid_acc:.4f}")
