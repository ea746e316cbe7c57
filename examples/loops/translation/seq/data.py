"""Sentence pairs in batches of one length each."""

import torch
from torch.utils.data import DataLoader, Dataset

PAD, BOS, EOS = 1, 2, 3


class Pairs(Dataset):
    def __init__(self, count, source_words, target_words, length):
        self.source = torch.randint(4, source_words, (count, length))
        self.target = torch.randint(4, target_words, (count, length))
        self.source[:, -5:] = PAD
        self.target[:, 0], self.target[:, -3], self.target[:, -2:] = BOS, EOS, PAD

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source[index], self.target[index]


def loaders(config):
    pairs = Pairs(config.pairs, config.source_words, config.target_words, config.length)
    train, valid = torch.utils.data.random_split(pairs, [0.9, 0.1])
    return DataLoader(train, config.batch_size, shuffle=True, drop_last=True), DataLoader(valid, config.batch_size)
