"""The command line: one file per command."""

import os

# Matrices here are small: a second BLAS thread only spins, for up to twice the CPU time. To be set before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from steptime._cli.app import main

__all__ = ["main"]
