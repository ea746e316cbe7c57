"""Sweeps on a real GPU, real training steps of several ranks, and the calibration of a box."""
