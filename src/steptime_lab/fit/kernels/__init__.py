"""Forms of kernel models fitted to measured rows: a module per form, found by its name."""
