"""The half of the engine that fits: non-negative weights of terms, trees, small networks, and their blends."""
