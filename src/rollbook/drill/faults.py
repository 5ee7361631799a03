"""The table of faults: what each breaks, what it needs, and which verdict is right.

    engines  slow_replica, dead_replica, wrong_temperature, tail_burst, growing_lengths, mismatch_to_nan
    weights  skipped_bucket, stale_replica, quantized_engine, noisy_engine, ..., with the checks and without
    rollout  stuck_prompt, sandboxes_gone, leaked_leases, samples_held_back, loose_bound, skewed_filter
    scorer   source_all_zero, scorer_down
    trainer  fragmentation, object_store_spill, lost_state
    host     clock_jump

Without the checks means: the engine's live weights are changed after the digests were compared, and the probe is
off; that is what a system without proofs would do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollbook.drill.fault import Fault
from rollbook.drill.inject import engines, host, rollout, scorer, trainer, weights

UNPROVEN: Mapping[str, Any] = {"sync.staging": "direct", "sync.probe": False}
"""Engines with weights of their own, and nothing that compares them after a publication."""

_TWO_REPLICAS = {"rollout.num_replicas": 2}

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="slow_replica",
            says="one replica's steps take ten times as long",
            expects=("slow_replica",),
            inject=engines.slow_replica,
            least=_TWO_REPLICAS,
        ),
        Fault(
            name="dead_replica",
            says="one replica's engine fails; the others take over what it was sampling",
            expects=("replica_died",),
            inject=engines.dead_replica,
            least=_TWO_REPLICAS,
        ),
        Fault(
            name="sandboxes_gone",
            says="half of the trajectories find their sandbox gone",
            expects=("dead_sandbox_pool",),
            inject=rollout.sandboxes_gone,
            needs={"run.max_failure_frac": 0.9},
        ),
        Fault(
            name="leaked_leases",
            says="leases of sandboxes are not given back (of a pool that the drill brings along)",
            expects=("sandbox_leak",),
            inject=rollout.leaked_leases,
        ),
        Fault(
            name="source_all_zero",
            says="the scorer gives 0 to everything from one source",
            expects=("one_source_all_zero",),
            inject=scorer.source_all_zero,
            least_sources=2,
        ),
        Fault(
            name="scorer_down",
            says="every call of the scorer fails",
            expects=("dead_scorer",),
            inject=scorer.scorer_down,
            ends_run=True,
        ),
        Fault(
            name="skewed_filter",
            says="the filter drops four groups of five",
            expects=("filter_starvation",),
            inject=rollout.skewed_filter,
            needs={"algorithm.filter.drop_flat": True, "algorithm.filter.refill": True},
        ),
        Fault(
            name="skipped_bucket",
            says="a bucket of weights does not arrive; the digests refuse the version",
            expects=("refused_publication",),
            inject=weights.skipped_bucket,
            ends_run=True,
        ),
        Fault(
            name="skipped_bucket_unproven",
            says="half of the tensors keep their old values, and nothing checks it",
            expects=("missed_weight_sync",),
            inject=weights.skipped_bucket_unproven,
            needs=UNPROVEN,
        ),
        Fault(
            name="stale_replica",
            says="one replica takes no publication any more, and is taken out of service",
            expects=("version_drift",),
            inject=weights.stale_replica,
            needs={"sync.staging": "direct"},
            least=_TWO_REPLICAS,
        ),
        Fault(
            name="stale_replica_unproven",
            says="one replica samples with old weights under new labels, and nothing checks it",
            expects=("version_drift",),
            inject=weights.stale_replica_unproven,
            needs=UNPROVEN,
            least=_TWO_REPLICAS,
        ),
        Fault(
            name="loose_bound",
            says="the buffer forgets its staleness bound",
            expects=("stale_samples",),
            inject=rollout.loose_bound,
            needs={"run.schedule": "separate_async"},
            least={  # slots for all that is admitted: what waits for one is sampled late, under a newer version
                "buffer.max_staleness_steps": 1,
                "rollout.num_slots": 256,
                "rollout.kv_pool_tokens": 16_384,
            },
        ),
        Fault(
            name="samples_held_back",
            says="finished trajectories reach the buffer late",
            expects=("buffer_never_fills",),
            inject=rollout.samples_held_back,
        ),
        Fault(
            name="stuck_prompt",
            says="one prompt of every step never ends before its deadline",
            expects=("buffer_never_fills",),
            inject=rollout.stuck_prompt,
            needs={"run.max_failure_frac": 0.9},
        ),
        Fault(
            name="quantized_engine",
            says="the engines round their matrices to four bits, and nothing checks it",
            expects=("engine_mismatch",),
            inject=weights.quantized_engine,
            needs=UNPROVEN,
        ),
        Fault(
            name="wrong_temperature",
            says="the engines sample at another temperature, and nothing checks it",
            expects=("engine_mismatch",),
            inject=engines.wrong_temperature,
            needs={"sync.probe": False},
        ),
        Fault(
            name="wrong_temperature_probed",
            says="the engines sample at another temperature; the probe refuses them",
            expects=("engine_mismatch",),
            inject=engines.wrong_temperature,
            ends_run=True,
        ),
        Fault(
            name="noisy_engine",
            says="the engines hold noise after one publication, and nothing checks it",
            expects=("silent_error_after_wake",),
            inject=weights.noisy_engine,
            needs=UNPROVEN,
        ),
        Fault(
            name="mismatch_to_nan",
            says="the engines' logprobs go astray until one is not a number",
            expects=("mismatch_to_nan",),
            inject=engines.mismatch_to_nan,
            needs={"sync.probe": False},
            ends_run=True,
        ),
        Fault(
            name="blocked_publication",
            says="a publication never ends: a collective in which one side has stopped",
            expects=("collective_hang",),
            inject=weights.blocked_publication,
            needs={"sync.staging": "direct"},
            ends_run=True,
        ),
        Fault(
            name="oom_in_sync",
            says="the replicas have no memory left for the new weights (simulated)",
            expects=("oom_in_sync",),
            inject=weights.oom_in_sync,
            ends_run=True,
        ),
        Fault(
            name="growing_lengths",
            says="responses grow until an update no longer fits (memory is simulated)",
            expects=("late_oom_with_length",),
            inject=engines.growing_lengths,
            ends_run=True,
        ),
        Fault(
            name="fragmentation",
            says="the allocator holds ever more that nobody uses (memory is simulated)",
            expects=("fragmentation",),
            inject=trainer.fragmentation,
        ),
        Fault(
            name="object_store_spill",
            says="batches go over the disk on their way to the trainer",
            expects=("object_store_spill",),
            inject=trainer.object_store_spill,
        ),
        Fault(
            name="clock_jump",
            says="the wall clock jumps back and forth: no alarm, and the log's clock is said to be wrong",
            expects=("well",),
            notes="the clock ran backwards",
            inject=host.clock_jump,
        ),
        Fault(
            name="tail_burst",
            says="in every third step one response runs on to eight times the usual limit",
            expects=("tail_burst",),
            inject=engines.tail_burst,
        ),
        Fault(
            name="lost_state",
            says="the run is taken up again with the weights and optimizer of its beginning",
            expects=("discontinuity_after_resume",),
            inject=trainer.lost_state,
            takes_up_again=True,
        ),
    )
}
