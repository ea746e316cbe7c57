"""Device memory of a step from its program: when storages live, and what a caching allocator makes of it."""
