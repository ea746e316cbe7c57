"""BERT of transformers trained from scratch on masked words."""

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

MASK, PAD = 103, 0


class Sentences(Dataset):
    def __init__(self, count=512, length=128, vocabulary=30522):
        self.ids = torch.randint(1000, vocabulary, (count, length))
        self.lengths = torch.randint(length // 2, length + 1, (count,))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index].clone()
        ids[self.lengths[index] :] = PAD
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def mask_tokens(batch, probability=0.15):
    labels = batch["input_ids"].clone()
    chosen = torch.bernoulli(torch.full(labels.shape, probability)).bool() & batch["attention_mask"].bool()
    labels[~chosen] = -100
    batch["input_ids"] = batch["input_ids"].masked_fill(chosen, MASK)
    batch["labels"] = labels
    return batch


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = BertForMaskedLM(BertConfig())
    model.to(device)
    model.train()
    loader = DataLoader(Sentences(), batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    epochs = 1
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=epochs * len(loader))
    for epoch in range(epochs):
        for step, batch in enumerate(loader):
            batch = {k: v.to(device) for k, v in mask_tokens(batch).items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 8 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} perplexity {torch.exp(loss).item():.1f}")
    model.save_pretrained("bert-scratch")


if __name__ == "__main__":
    main()
