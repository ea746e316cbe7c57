"""DistilBERT of transformers on sentence pairs of different lengths, with an accuracy metric."""

import random

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification, get_scheduler

random.seed(0)


def make_examples(count):
    for _ in range(count):
        yield {"input_ids": [random.randint(1000, 30000) for _ in range(random.randint(12, 90))], "label": random.randint(0, 1)}


def collate_fn(examples):
    longest = max(len(example["input_ids"]) for example in examples)
    padded = [example["input_ids"] + [0] * (longest - len(example["input_ids"])) for example in examples]
    ids = torch.tensor(padded)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([e["label"] for e in examples])}


train_dataloader = DataLoader(list(make_examples(800)), shuffle=True, batch_size=32, collate_fn=collate_fn)
eval_dataloader = DataLoader(list(make_examples(160)), batch_size=32, collate_fn=collate_fn)

model = DistilBertForSequenceClassification(DistilBertConfig(num_labels=2))
optimizer = AdamW(model.parameters(), lr=5e-5)
num_epochs = 2
num_training_steps = num_epochs * len(train_dataloader)
lr_scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_training_steps)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
model.to(device)

for epoch in range(num_epochs):
    model.train()
    for batch in train_dataloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    correct = total = 0
    model.eval()
    for batch in eval_dataloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.no_grad():
            outputs = model(**batch)
        predictions = torch.argmax(outputs.logits, dim=-1)
        correct += (predictions == batch["labels"]).sum().item()
        total += len(predictions)
    print(f"epoch {epoch}: loss {loss}, accuracy {correct / total:.3f}")
