"""The facts of a launch that have a term of their own in its time; any other fact is only a feature of the residual."""

from __future__ import annotations

# Fact -> what it says. A launch that does not have it stands at the value in DEFAULTS, else at zero.
FACTS = {
    "sector_waste": "sectors of 32 bytes that a warp touches, over the fewest possible, for the worst operand",
    "casts": "1 where elements are converted",
    "tail": "1 where the elements are no multiple of the vector",
    "rows": "rows that are worked on one by one",
    "gathered_bytes": "bytes of all rows looked up, repeated ones included",
    "reuse": "how often an element looked up or written is met",
    "items": "indices looked up, or parts joined",
    "host_bytes": "bytes that cross to or from the host",
    "pageable_bytes": "those of them in pageable memory",
    "split": "blocks that share one output, where several do",
    "block_height": "rows of threads in a block of a reduction",
    "footprint_bytes": "bytes of the table that is looked up or scattered into",
    "tensors": "tensors of a list in this launch",
    "odd_share": "share of a list's tensors that are no multiple of the vector",
    "chain_ns": "a nanosecond or so for every step of the longest chain of dependent loads",
}
# 500 ns is about one load from memory (seen as the least cold kernel of every kind less the least warm one).
DEFAULTS = {"sector_waste": 1.0, "split": 1.0, "chain_ns": 500.0}
