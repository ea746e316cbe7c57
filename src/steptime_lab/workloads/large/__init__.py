"""Training steps of decoders divided over several ranks in every way that PyTorch has, each a plain training script."""
