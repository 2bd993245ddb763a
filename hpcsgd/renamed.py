"""Names that were changed before the first release; `near_miss` suggests the new ones.

An old name has no meaning any more. This table may go once no scripts or job files have old names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

RENAMED: Mapping[str, tuple[str, ...]] = {
    # public names
    "Averaged": ("AverageState",),
    "Job": ("Topology",),
    "Joined": ("ChainedOptimizer",),
    "OverPositions": ("AcrossShards",),
    "Packed": ("Quantized",),
    "PerRun": ("PerBlock",),
    "RateInside": ("LrInErrorFeedback",),
    "Reset": ("ResetState",),
    "des_loco": ("des_loc",),
    "ensemble": ("ensemble_sync",),
    "kept": ("keep_state", "keep"),
    "no_loco": ("noloco",),
    "shard": ("fully_shard", "fsdp"),
    "sparse_loco": ("sparseloco",),
    "streamed": ("streaming",),
    "wires": ("quantizers",),
    # arguments of methods and of DistributedOptimizer, and values of keys in job files
    "accumulate": ("gradient_accumulation_steps",),
    "average": ("quantize",),
    "averaged": ("average",),
    "blend": ("update_alpha",),
    "block": ("adapt_every",),
    "bucket_mb": ("bucket_cap_mb",),
    "delay": ("sync_delay",),
    "every": ("sync_every",),
    "everyones": ("union",),
    "exchange": ("grad_reduce",),
    "exchange_seconds": ("grad_reduce_seconds",),
    "first": ("first_every",),
    "fragments": ("num_fragments",),
    "how": ("averager",),
    "interval": ("initial_sync_every",),
    "job": ("topology", "parallel"),
    "master": ("master_dtype",),
    "moments": ("optimizer_state",),
    "over_positions": ("across_shards",),
    "own": ("per_worker",),
    "overlap": ("overlap_grad_reduce",),
    "packed": ("quantized",),
    "per_run": ("per_block",),
    "prefetch": ("overlap_param_gather",),
    "rate_inside": ("lr_in_error_feedback",),
    "second": ("second_every",),
    "select": ("selection",),
    "staleness": ("max_staleness", "overlap_steps"),
    "steps": ("sync_delay",),
    "when": ("schedule",),
    # sections and keys of job files, their values, and flags
    "batch_size": ("group_batch_size",),
    "blocks": ("fsdp_units", "units"),
    "build": ("name",),
    "checkpoint_every": ("checkpoint_every_steps",),
    "cost": ("cost_s",),
    "cross": ("inter_group",),
    "evaluate_every": ("eval_every_epochs",),
    "evaluation_tokens": ("eval_tokens",),
    "folder": ("output_dir",),
    "group": ("intra_group",),
    "idle": ("offload_dir",),
    "island": ("replica_group",),
    "living": ("alive",),
    "margin": ("min_gain",),
    "meeting_seconds": ("model_average_seconds",),
    "meets": ("sync_rate",),
    "per": ("interval",),
    "reallocation": ("rebalance",),
    "restarts": ("max_restarts",),
    "scaling_follows": ("scale_with",),
    "schedule": ("lr_schedule",),
    "share": ("overlap_share",),
    "shards": ("leaves_shards",),
    "silence": ("heartbeat_timeout",),
    "silence_seconds": ("heartbeat_timeout_seconds",),
    "sinks": ("loggers",),
    "start": ("init_from",),
    "stop_ahead": ("stop_before_end_s",),
    "store": ("path", "data_file"),
    "time_limit": ("time_limit_s",),
    "timeout": ("timeout_s",),
    "trace": ("trace_steps",),
    "transport": ("device_backend",),
    "tune": ("autotune_steps",),
    "unit": ("resource",),
    "workers": ("num_workers",),
}
"""The new names of each old name; the place in a script or job file decides which of them is meant."""

OF_OTHERS: Mapping[str, str] = {
    "DistributedSampler": "Sampler",
    "Join": "equal_batches",
    "SyncBatchNorm": "sync_batch_norm",
    "all_reduce": "allreduce",
    "join": "equal_batches",
}
"""Names of torch and Horovod that hpcsgd does not have, and its public name for the same purpose."""


def new_name(old: str, allowed: Collection[str]) -> str | None:
    """Return the one of the `allowed` names that has replaced `old`, or None.

    >>> new_name("every", ["sync_every", "grad_reduce"])
    'sync_every'
    """
    return next((name for name in RENAMED.get(old, ()) if name in allowed), None)
