"""A program of eager ops as `torch.compile` would run it: our own fusion pass, not PyTorch's compiler."""
