"""GPT-2 of transformers on blocks of text: fp16 with a scaler, accumulation over four batches, perplexity at the end."""

import argparse
import math

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a causal language model")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--block_size", type=int, default=512)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--max_train_steps", type=int, default=6)
    return parser.parse_args()


def main():
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set = TensorDataset(torch.randint(0, 50257, (256, args.block_size)))
    eval_set = TensorDataset(torch.randint(0, 50257, (32, args.block_size)))
    train_dataloader = DataLoader(train_set, shuffle=True, batch_size=args.per_device_train_batch_size)
    eval_dataloader = DataLoader(eval_set, batch_size=args.per_device_train_batch_size)
    model = GPT2LMHeadModel(GPT2Config()).to(device)
    no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(name in n for name in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(name in n for name in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 2, args.max_train_steps)
    scaler = torch.cuda.amp.GradScaler()
    completed_steps, total_loss = 0, 0
    model.train()
    while completed_steps < args.max_train_steps:
        for step, (input_ids,) in enumerate(train_dataloader):
            input_ids = input_ids.to(device)
            with torch.cuda.amp.autocast():
                loss = model(input_ids, labels=input_ids).loss
            total_loss += loss.detach().float()
            scaler.scale(loss / args.gradient_accumulation_steps).backward()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if not torch.isfinite(norm):
                    print("gradient norm is not finite")
                scaler.step(optimizer)
                scaler.update()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
                print(f"step {completed_steps}: loss {loss.item():.4f}, gradient norm {norm:.3f}")
            if completed_steps >= args.max_train_steps:
                break
    model.eval()
    losses = []
    for (input_ids,) in eval_dataloader:
        with torch.no_grad():
            loss = model(input_ids.to(device), labels=input_ids.to(device)).loss
        losses.append(loss.repeat(args.per_device_train_batch_size))
    perplexity = math.exp(min(torch.mean(torch.cat(losses)).item(), 20))
    print(f"perplexity {perplexity}, train loss {total_loss.item() / max(completed_steps, 1)}")
    torch.save(model.state_dict(), "gpt2.pt")


if __name__ == "__main__":
    main()
