"""The zoo predicted and measured: `answers` (what was predicted), `measured`, `left_out` (models without a group), `zoo`."""
