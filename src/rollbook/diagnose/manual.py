"""What to look at for each fault, before `rollbook diagnose` has said it: the rows of the duty manual, in the order of
the decision tree. A `{name}` is filled in from the job."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.diagnose.finding import Area


@dataclass(frozen=True, slots=True)
class Entry:
    """One fault: its sign, told from its neighbours, and the first two moves."""

    area: Area
    sign: str
    not_this: str
    """What looks alike and how it differs."""
    do: str
    next: str


ENTRIES: dict[str, Entry] = {
    "dead_sandbox_pool": Entry(
        "data",
        "`failures/frac` above {max_failed_frac}, `env/capacity` below {min_sandbox_frac} of its best, "
        "seconds a turn jump; "
        "reward falls at the same step",
        "a broken scorer: rewards fall, turns and failures do not move",
        "restart the pool; failed trajectories are never trained as zeros",
        "failures by class and source",
    ),
    "sandbox_leak": Entry(
        "data",
        "`env/num_leased` grows step by step while turns and lengths stay; queue and seconds a turn follow",
        "dead sandboxes: a break, not a ramp",
        "give leases an owner and a time to live, restart the pool",
        "living sandboxes against running trajectories",
    ),
    "slow_environment": Entry(
        "data",
        "`env/turn_s/mean` jumps and generation with it; turns, lengths, failures and rewards do not move",
        "dead sandboxes: failures, turns and rewards move as well; a leak: calls take ever longer; a slow host: the "
        "trainer's stages are slower, too",
        "see how many sandboxes are alive and whether the service behind them throttles; give calls a deadline",
        "one call by hand, alone and beside many",
    ),
    "one_source_all_zero": Entry(
        "data",
        "`reward/<source>/zero_frac` = 1 for one of {sources}, the others go on",
        "a collapsing policy: every source falls",
        "take the source out of the mix",
        "score ten of its reference answers in the worker that scores during training",
    ),
    "filter_starvation": Entry(
        "data",
        "`filter/kept_frac` below {min_kept_frac}, generation takes longer at the same lengths",
        "waiting for samples: the filter drops no more than before",
        "sample prompts by difficulty, cap the refills ({max_refills} a step here)",
        "share of right answers by prompt",
    ),
    "dead_scorer": Entry(
        "data",
        "`failures/reward/num` above 0 for more than a tenth of the trajectories; turns and environments go on",
        "dead sandboxes: the failures are the environment's",
        "restart the scorer, take the run up again",
        "ten reference answers in the worker that scores during training",
    ),
    "all_wrong": Entry(
        "data",
        "from the first step on `critic/score/max` is `critic/score/min`, at the bottom, and `actor/grad_norm` is 0",
        "a hard task: some group differs now and then",
        "score reference answers by hand, then easier prompts or a warm-up",
        "five trajectories beside their reference answers",
    ),
    "all_right": Entry(
        "data",
        "from the first step on `critic/score/max` is `critic/score/min`, at the top, and `actor/grad_norm` is 0",
        "a run that has learned its prompts: it began lower",
        "harder prompts",
        "a wrong answer on purpose: does the scorer refuse it?",
    ),
    "refused_publication": Entry(
        "version",
        "`publication_failed` twice and the run stops: a tensor is missing, or its digest differs",
        "a missed sync: nobody noticed",
        "mend what the error names and resume; the replicas hold the version before",
        "does the same tensor fail again?",
    ),
    "missed_weight_sync": Entry(
        "version",
        "the gap grows with the steps since the last good publication; `sync/num_bytes` or `timing_s/update_weights` "
        "fall away; reward stands still",
        "a mismatch: the gap steps and stays; staleness: the gap follows `trajectory_staleness`",
        "stop, publish in full, take up the checkpoint before it began",
        "digest of one replica's live parameters, then the probe",
    ),
    "version_drift": Entry(
        "version",
        "`replica/*/weight_version` spread above {max_spread}; the oldest samples age by one version a "
        "step, the newest "
        "do not",
        "a missed sync: all of them stand",
        "quarantine the standing replicas and publish to them in full",
        "their first failed publication",
    ),
    "discontinuity_after_resume": Entry(
        "version",
        "learning rate, gradient norm, entropy and reward jump at the step of a restart",
        "another source or scorer: entropy and gradient norm stay",
        "take up the last whole checkpoint again",
        "what the checkpoint holds against what was loaded",
    ),
    "stale_samples": Entry(
        "async",
        "`trajectory_staleness_worst/max` {staleness_sign}, the gap follows it, "
        "effective sample "
        "size below {min_eff_sample_size}",
        "standing engines: staleness grows by one a step and does not stop",
        "lower buffer.max_staleness_steps or give generation more devices",
        "the gap by staleness: at 0 it must be at its floor",
    ),
    "buffer_never_fills": Entry(
        "async",
        "`timing_s/gen` is most of the step at the same lengths; `buffer/num_finished` stays below {groups_per_step}",
        "longer responses, a filter or slow sandboxes explain the seconds",
        "put a deadline on trajectories (here {group_deadline_s} s a group), admit less ahead when they are evicted",
        "the oldest running trajectory: age, turn, replica",
    ),
    "silent_error_after_wake": Entry(
        "implementation",
        "at one step the gap jumps many times, reward falls to the bottom, lengths run to {max_response_tokens} or "
        "collapse",
        "a mismatch: the answers still make sense",
        "stop, restart the engines, sleep level 1",
        "digests of every tensor after one sleep and wake",
    ),
    "mismatch_to_nan": Entry(
        "implementation",
        "the gap and the tail of the importance weights grow, gradients spike, then NaN",
        "a learning rate that is too high: step KL and entropy move first",
        "go back, truncate the importance weights",
        "does the gap grow with the learning rate at 0?",
    ),
    "engine_mismatch": Entry(
        "implementation",
        "`training/logprob_gap/mean` above {max_logprob_gap_nats} nats at one version, from the start or at once",
        "a missed sync: the gap grows from its floor",
        "same dtype, kernels, temperature and routing on both sides, or truncated importance weights",
        "one greedy prompt scored on both sides, layer by layer",
    ),
    "collective_hang": Entry(
        "implementation",
        "no step for {stalled_steps} steps' worth of time ({stalled_s} s at least) inside a trainer stage",
        "waiting for samples: the open stage is the rollout",
        "dump the stacks of all ranks before killing anything",
        "micro batches by rank in that step",
    ),
    "oom_in_sync": Entry(
        "implementation",
        "out of memory, or device memory at the brim, while weights change hands; sync seconds rise before",
        "growing responses: memory rises during training",
        "smaller sync.bucket_bytes ({bucket_bytes} here), staging 'direct', drop the KV pool first",
        "memory by owner at the three points of the hand-over",
    ),
    "late_oom_with_length": Entry(
        "implementation",
        "memory rises with `response_length/*` until the longest batch does not fit",
        "fragmentation: reserved grows, allocated does not",
        "lower trainer.micro_batch_tokens ({micro_batch_tokens} here) or cap the responses",
        "peak memory against tokens of the largest micro batch",
    ),
    "fragmentation": Entry(
        "implementation",
        "`memory/*/fragmented_bytes` above {max_fragmented_frac} of what is reserved, and growing",
        "an allocator that warms up: it stops after the first steps",
        "expandable segments, empty the cache at the hand-over",
        "a memory snapshot after the hand-over",
    ),
    "object_store_spill": Entry(
        "implementation",
        "`host/object_store_spilled_bytes` above 0; `timing_s/other` and stages without compute slow down",
        "slow sandboxes: only generation slows down",
        "more memory for the object store, drop references to old batches",
        "who holds the objects",
    ),
    "tail_burst": Entry(
        "implementation",
        "`rollout/tail_s` above {max_tail_frac} of the rollout; the longest responses jump, the mean does not",
        "longer responses: the mean grows as well",
        "cap or shape the length, continue partial responses, or train asynchronously",
        "read the longest responses of one such step",
    ),
    "slow_replica": Entry(
        "implementation",
        "`replica/*/tokens_per_s` of one replica below half of the others'",
        "a tail: every replica has it",
        "take it out of service",
        "seconds of a decode step on it alone",
    ),
    "slow_generation": Entry(
        "implementation",
        "`timing_s/gen` at least twice what the lengths explain, for good, and nothing else moves",
        "waiting, a filter, a tail, slow environments, a slow host: each has a series of its own that moved",
        "see how many replicas serve, and what preempts their requests; log tokens/s of each",
        "tokens/s of one replica alone at the same batch",
    ),
    "replica_died": Entry(
        "implementation",
        "`quarantined` with the words of a process that is gone, in events.jsonl; `replica/num_serving` below what was "
        "asked for; in other systems' console logs the words of a dead engine (EngineDeadError, a failed health check, "
        "an actor that died) with steps after them",
        "a replica that was taken out alive: its publication was refused, or the probe found other logprobs",
        "read its own log; resume the run if it did not come back (`cluster.max_restarts`)",
        "is it always the same replica or host?",
    ),
    "not_finite": Entry(
        "implementation",
        "`actor/pg_loss`, `actor/grad_norm` or `critic/vf_loss` is NaN or infinite, and stays so",
        "an engine mismatch that ends in NaN: then the gap grew first; a learning rate that is too high: then step KL "
        "and gradients did",
        "resume from before that step; skip updates whose gradient is not finite",
        "the first value of that batch that is no number, loss by loss",
    ),
    "absurd_gradient": Entry(
        "implementation",
        "`actor/grad_norm` above 100,000, in single steps or all along, while losses are numbers",
        "a learning rate that is too high: gradients grow over steps, with step KL and entropy",
        "skip such updates; bound ratios, importance weights and low-variance KL",
        "the largest log-ratio of a token in that batch",
    ),
    "no_update": Entry(
        "implementation",
        "`actor/grad_norm` or `actor/lr` is exactly 0 while rewards differ",
        "all wrong, all right: no two rewards differ; flat groups: `batch/effective_frac` is near 0",
        "look at the grouping of answers, at what the optimizer holds, at the end of the schedule",
        "advantages of one batch, then the parameters that require a gradient",
    ),
    "all_rejected": Entry(
        "implementation",
        "`rollout_corr/rollout_rs_masked_fraction` or `.../rollout_rs_seq_masked_fraction` above 0.8",
        "a missed sync, a mismatch, staleness: then the gap rose first, and rejection only says so",
        "widen the bounds of `algorithm.correction.reject`, or bound means instead of sums over a sequence",
        "the statistic that is bounded, at staleness 0",
    ),
    "run_stopped": Entry(
        "implementation",
        "`run_failed` at the end of events.jsonl, or a traceback at the end of the console log",
        "a hang: the log ends without an error",
        "what the error says",
        "resume from the newest checkpoint",
    ),
}
