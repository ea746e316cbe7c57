"""A Llama of transformers in bfloat16 with frozen weights and low-rank adapters on its attention."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM


class LoRALinear(nn.Module):
    def __init__(self, base, r=16, alpha=32, dropout=0.05):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scaling, self.dropout = alpha / r, nn.Dropout(dropout)

    def forward(self, x):
        update = self.dropout(x).to(self.lora_a.dtype) @ self.lora_a.T @ self.lora_b.T
        return self.base(x) + self.scaling * update.to(x.dtype)


def add_lora(model, names=("q_proj", "v_proj")):
    for parameter in model.parameters():
        parameter.requires_grad = False
    for layer in model.model.layers:
        for name in names:
            setattr(layer.self_attn, name, LoRALinear(getattr(layer.self_attn, name)))


def print_trainable_parameters(model):
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")


class Instructions(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(3, 32000, (512,))
        mask = torch.ones_like(ids)
        mask[: index % 100] = 0
        labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main():
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    add_lora(model)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.config.use_cache = False
    print_trainable_parameters(model)
    model = model.to("cuda")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    loader = DataLoader(Instructions(), batch_size=4, shuffle=True)
    model.train()
    for step, batch in enumerate(loader):
        batch = {k: v.to(model.device) for k, v in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.3)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            print(f"step {step}: {loss.item():.3f}, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    torch.save({n: p for n, p in model.state_dict().items() if "lora_" in n}, "adapter.pt")


if __name__ == "__main__":
    main()
