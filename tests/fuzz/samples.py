"""Small inputs that are sound: what cases damage."""

from __future__ import annotations

from typing import Any

TASK = """
batch = 16384
dense_features = 8
bottom = [16]
top = [16, 1]
interaction = "cat"
optimizer = "rowwise_adagrad"
[constraints]
memory_bytes = 30_000_000_000
kinds = ["table_wise", "column_wise"]
pinned = { item = 1 }
kinds_of = { user = ["row_wise", "table_wise"] }
headroom = 0.1
min_partition = { user = 8 }
max_partition = { user = 16, item = 16 }
[[tables]]
name = "user"
rows = 1_000_000
dim = 32
pooling_factor = 3.5
skew = { kind = "zipf", alpha = 0.9, shift = 20, lengths = "geometric", locality = 0.1, window = 5 }
[[tables]]
name = "item"
rows = 2000
dim = 16
pooling_factor = 20
statistics = { reuse = [0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], unique = 900, batch = 256 }
"""
TABLES = (
    "name,rows,dim,pooling_factor,kind,alpha,precision,pinned,kinds,min_partition,max_partition\n"
    "user,1000,32,3.5,zipf,1.1,fp32,,row_wise|column_wise|table_wise,8,16\nitem,2000,16,20,uniform,,fp32,1,,,\n"
)
COLLECTION = {
    "tables": [
        {"name": "user", "num_embeddings": 1000, "embedding_dim": 32, "feature_names": ["a", "b"], "data_type": "FP32"},
        {"name": "item", "num_embeddings": 2000, "embedding_dim": 16, "feature_names": ["c"], "pooling_factor": 3.0},
    ]
}
_SHARDS = [
    {"shard_offsets": [0, 16 * rank], "shard_sizes": [1000, 16], "placement": f"rank:{rank}/cuda:{rank}"} for rank in range(2)
]
_OPTION = {"plan": {"user": [0, 1], "item": [1]}, "kinds": {"user": "column_wise", "item": "table_wise"}, "step_time_ms": 1.0}
PLANS: tuple[Any, ...] = (
    {"user": [0, 1], "item": 1},
    {"mine": {"user": {"kind": "row_wise", "ranks": [0, 1]}, "item": 1}, "other": {"user": 0, "item": 1}},
    [{"user": {"kind": "data_parallel"}, "item": 1}, {"user": 1, "item": 1}],
    {"schema_version": 1, "best": _OPTION, "alternatives": [_OPTION], "warnings": []},
    {"schema_version": 1, "plans": [{"name": "mine", **_OPTION}, {"name": "other", **_OPTION}]},
    {
        "schema_version": 1,
        "torchrec": "torchrec.distributed.types.ShardingPlan",
        "world_size": 2,
        "plan": {
            "": {
                "user": {
                    "sharding_type": "column_wise", "compute_kernel": "fused", "ranks": [0, 1],
                    "sharding_spec": {"shards": _SHARDS},
                },
                "item": {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [1], "sharding_spec": None},
            }
        },
    },
    {"user": {"kind": "table_row_wise", "ranks": [0, 1]}, "item": 1},
    {"user": {"kind": "grid_shard", "ranks": [[0, 1], [0, 1]]}, "item": 1},
    {"user": {"kind": "table_column_wise", "ranks": [1, 0]}, "item": 1},
)  # fmt: skip
DLRM = """
kind = "dlrm"
ranks = 2
batch = 2048
dense_features = 13
bottom = [256, 128, 64]
top = [512, 256, 1]
lookup = "table_batched"
optimizer = "sgd"
interaction = "dot"
loss = "bce"
tables = [
  { name = "user", rows = 400_000, dim = 64, pooling_factor = 1, skew = { kind = "zipf", alpha = 0.9 } },
  { name = "clicked", rows = 200_000, dim = 64, pooling_factor = 40, skew = { kind = "zipf", alpha = 1.05, locality = 0.2 } },
  { name = "words", rows = 300_000, dim = 64, pooling_factor = 12, skew = { kind = "power", alpha = 3, lengths = "uniform" } },
  { name = "country", rows = 240, dim = 64, pooling_factor = 1, skew = { kind = "hot", alpha = 4, shift = 10 } },
]
[plan]
user = 0
clicked = 1
words = 0
country = 1
"""
GPT = """
layers = 4
width = 1024
heads = 16
kv_heads = 4
sequence = 1024
vocabulary = 32000
batch = 64
feed_forward = 2816
precision = "bf16"
positions = "rotary"
norm = "rms_norm"
activation = "swiglu"
optimizer = "adamw_fused"
[parallel]
fsdp = 4
data = 2
"""
PLATFORM = 'schema_version = 1\nname = "mine"\nranks = 2\ndevice = "h200"\nhost = "host.json"\nfabric = "h200-nvlink"\n'
SHARE = 'schema_version = 1\npart_of = "h200"\nshare = 2\n'
NCCL_TREE: dict[str, Any] = {
    "nccl_version": 22902,
    "args": ["all_reduce_perf"],
    "config": {"devices": [{"hostname": "a", "device_info": "H100"}] * 2, "nthreads": 1, "ngpus": 1},
    "results": [{"size": 1 << size, "out_of_place": {"time": 10.0 + 1.2**size}} for size in range(10, 28)],
}
NCCL_TEXT = "\n".join(
    [
        "# nccl-library=22902",
        "# Collective test starting: all_reduce_perf",
        "# Using devices",
        *(f"#  Rank {rank} Group 0 Pid 1 on host device {rank} [0000:01:00] NVIDIA H100" for rank in range(2)),
        *(f"{1 << size} 1 int8 none -1 {10 + 1.2**size:.2f} 1 1 0 12 1 1 0" for size in range(10, 28)),
    ]
)

# A step that keeps its GPUs busy, so that what their kernels take is seen.
BUSY_GPT = """
layers = 4
width = 4096
heads = 32
kv_heads = 8
sequence = 2048
vocabulary = 32000
batch = 64
feed_forward = 11008
precision = "bf16"
positions = "rotary"
norm = "rms_norm"
activation = "swiglu"
optimizer = "adamw_fused"
[parallel]
tensor = 2
sequence = true
data = 4
"""
BUSY_DLRM = DLRM.replace("batch = 2048", "batch = 65536").replace("[256, 128, 64]", "[2048, 1024, 64]")
