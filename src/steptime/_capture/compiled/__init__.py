"""Compiled regions: what `torch.compile` makes of a step, decided by PyTorch's own compiler for the pretended device."""
