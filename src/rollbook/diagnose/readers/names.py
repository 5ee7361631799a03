"""Other frameworks' metric names, and earlier ones of verl, in the catalogue's. What is not listed keeps its name.

Sources: verl 0.9 and its change log (`mismatch/*` became `rollout_corr/*`), TRL 1.16 `GRPOTrainer` and
`AsyncGRPOTrainer`, slime's `train_metric_utils`/`ray/rollout.py` and miles' `weight_version` metrics, AReaL's
`stats_tracker` keys of its PPO actor. Only names whose meaning is the same are listed.
"""

from __future__ import annotations

import re

VERL = {
    "actor/entropy_loss": "actor/entropy",
    "actor/perf/max_memory_allocated_gb": "perf/max_memory_allocated_gb",
    "actor/perf/max_memory_reserved_gb": "perf/max_memory_reserved_gb",
    "actor/perf/cpu_memory_used_gb": "perf/cpu_memory_used_gb",
    "actor/ppo_kl_mean": "actor/ppo_kl",
    "timing_s/update_policy": "timing_s/update_actor",
    "timing_s/generate_sequences": "timing_s/gen",
    "timing_s/wait_prev_gen": "timing_s/gen",
    "timing_s/sync_rollout_weights": "timing_s/update_weights",
    "timing_s/param_sync": "timing_s/update_weights",
    "timing_s/reshard": "timing_s/update_weights",
    "timing_s/compute_log_prob": "timing_s/old_log_prob",
    "timing_s/agent_loop/tool_calls/mean": "env/turn_s/mean",
    "timing_s/agent_loop/tool_calls/max": "env/turn_s/max",
    "agent_loop/tool_calls/mean": "env/turn_s/mean",
    "agent_loop/tool_calls/max": "env/turn_s/max",
    "timing_s/agent_loop/slowest/tool_calls": "perf/non_generation_time/max",
    "agent_loop/slowest/tool_calls": "perf/non_generation_time/max",
    "training/rollout_probs_diff/mean": "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff/max": "training/rollout_probs_diff_max",
    "training/rollout_probs_diff/std": "training/rollout_probs_diff_std",
    "fully_async/count/dropped_stale_samples": "training/off_policy/evicted_samples",
    "fully_async/staleness/mean": "training/off_policy/trajectory_staleness/mean",
    "fully_async/staleness/max": "training/off_policy/trajectory_staleness/max",
    "fully_async/trajectory_staleness/mean": "training/off_policy/trajectory_staleness/mean",
    "fully_async/trajectory_staleness/max": "training/off_policy/trajectory_staleness/max",
}

TRL = {
    "reward": "critic/rewards/mean",
    "completion_length": "response_length/mean",
    "completions/mean_length": "response_length/mean",
    "completions/max_length": "response_length/max",
    "completions/min_length": "response_length/min",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "clip_ratio": "actor/pg_clipfrac",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "sampling/sampling_logp_difference/mean": "training/logprob_gap/mean",
    "sampling/sampling_logp_difference/max": "training/logprob_gap/max",
    "sampling/importance_sampling_ratio/mean": "rollout_corr/rollout_is_mean",
    "sampling/importance_sampling_ratio/min": "rollout_corr/rollout_is_min",
    "sampling/importance_sampling_ratio/max": "rollout_corr/rollout_is_max",
    "sample/staleness": "training/off_policy/trajectory_staleness/mean",
    "rollout/staleness": "training/off_policy/trajectory_staleness/mean",
    "sample/staleness_mean": "training/off_policy/trajectory_staleness/mean",
    "sample/staleness_max": "training/off_policy/trajectory_staleness/max",
    "sample/dropped_stale_total": "training/off_policy/evicted_samples",
    "tools/failure_frequency": "rollout/sandbox_error_ratio",
    "rollout/turns_mean": "num_turns/mean",
    "step_time": "timing_s/step",
    "perf/step_s": "timing_s/step",
    "perf/rollout_wait_s": "timing_s/gen",
    "perf/fwd_bwd_s": "timing_s/update_actor",
    "perf/weight_sync_s": "timing_s/update_weights",
    "profiling/Time taken: GRPOTrainer.vLLM.generate": "timing_s/gen",
    "profiling/Time taken: GRPOTrainer.sync_weights": "timing_s/update_weights",
    "epoch": "training/epoch",
}

SLIME = {
    "rollout/raw_reward": "critic/rewards/mean",
    "rollout/raw_reward_mean": "critic/rewards/mean",
    "rollout/raw_reward_min": "critic/rewards/min",
    "rollout/raw_reward_max": "critic/rewards/max",
    "rollout/response_len/mean": "response_length/mean",
    "rollout/response_lengths": "response_length/mean",
    "rollout/response_len/max": "response_length/max",
    "rollout/response_len/min": "response_length/min",
    "rollout/response_len/median": "response_length/p50",
    "rollout/truncated_ratio": "response_length/clip_ratio",
    "rollout/truncated": "response_length/clip_ratio",
    "rollout/aborted_ratio": "response/aborted_ratio",
    "rollout/failed_ratio": "failures/frac",
    "rollout/prefix_cache_hit_rate": "rollout/prefix_hit_frac",
    "rollout/fully_async/avg_staleness": "training/off_policy/trajectory_staleness/mean",
    "rollout/fully_async/max_staleness": "training/off_policy/trajectory_staleness_worst/max",
    "rollout/fully_async/stale_groups_recycled": "training/off_policy/evicted_samples",
    "rollout/sample_staleness": "training/off_policy/trajectory_staleness/mean",
    "staleness/total/mean": "training/off_policy/trajectory_staleness/mean",
    "staleness/total/max": "training/off_policy/trajectory_staleness_worst/max",
    "train/loss": "actor/loss",
    "train/pg_loss": "actor/pg_loss",
    "train/pg_clipfrac": "actor/pg_clipfrac",
    "train/ppo_kl": "actor/ppo_kl",
    "train/kl_loss": "actor/kl_loss",
    "train/entropy_loss": "actor/entropy",
    "train/grad_norm": "actor/grad_norm",
    "train/lr-pg_0": "actor/lr",
    "train/train_rollout_logprob_abs_diff": "training/logprob_gap/mean",
    "train/train_rollout_kl": "rollout_corr/kl",
    "train/mis_kl": "rollout_corr/kl",
    "train/mis_k3_kl": "rollout_corr/k3_kl",
    "train/mis_ppl_ratio": "rollout_corr/ppl_ratio",
    "train/tis": "rollout_corr/rollout_is_mean",
    "train/value_clipfrac": "critic/vf_clipfrac",
    "train/value_loss": "critic/vf_loss",
    "perf/rollout_time": "timing_s/gen",
    "perf/actor_train_time": "timing_s/update_actor",
    "perf/log_probs_time": "timing_s/old_log_prob",
    "perf/ref_log_probs_time": "timing_s/ref",
    "perf/update_weights_time": "timing_s/update_weights",
    "perf/save_model_time": "timing_s/save_checkpoint",
    "perf/step_time": "timing_s/step",
}

AREAL = {
    "ppo_actor/task_reward/avg": "critic/rewards/mean",
    "ppo_actor/task_reward/max": "critic/rewards/max",
    "ppo_actor/task_reward/min": "critic/rewards/min",
    "ppo_actor/seq_len/avg": "response_length/mean",
    "ppo_actor/seq_len/max": "response_length/max",
    "ppo_actor/seq_len/min": "response_length/min",
    "ppo_actor/prompt_len/avg": "prompt_length/mean",
    "ppo_actor/no_eos_ratios/avg": "response_length/clip_ratio",
    "ppo_actor/advantages/avg": "critic/advantages/mean",
    "ppo_actor/update/actor_loss/avg": "actor/pg_loss",
    "ppo_actor/update/entropy/avg": "actor/entropy",
    "ppo_actor/update/clip_ratio/avg": "actor/pg_clipfrac",
    "ppo_actor/update/approx_kl/avg": "actor/ppo_kl",
    "ppo_actor/update/grad_norm": "actor/grad_norm",
    "ppo_actor/update/lr": "actor/lr",
    "ppo_actor/update/behave_imp_weight/avg": "rollout_corr/rollout_is_mean",
    "ppo_actor/update/behave_imp_weight/max": "rollout_corr/rollout_is_max",
    "ppo_actor/update/behave_imp_weight/min": "rollout_corr/rollout_is_min",
    "ppo_actor/update/behave_approx_kl/avg": "rollout_corr/kl",
    "ppo_actor/update/behave_kl/avg": "rollout_corr/kl",
    "ppo_actor/update/behave_k3/avg": "rollout_corr/k3_kl",
    "ppo_actor/update/compute_logp/kl_div_dual/avg": "rollout_corr/k3_kl",
    "ppo_actor/update/logp_abs_diff/avg": "training/logprob_gap/mean",
    "ppo_actor/update/logp_abs_diff/max": "training/logprob_gap/max",
    "timeperf/rollout": "timing_s/gen",
    "timeperf/recompute_logp": "timing_s/old_log_prob",
    "timeperf/ref_logp": "timing_s/ref",
    "timeperf/critic_values": "timing_s/values",
    "timeperf/compute_advantages": "timing_s/adv",
    "timeperf/compute_advantage": "timing_s/adv",
    "timeperf/train_step": "timing_s/update_actor",
    "timeperf/update_weights": "timing_s/update_weights",
    "timeperf/save": "timing_s/save_checkpoint",
    "timeperf/checkpoint_for_recover": "timing_s/save_checkpoint",
    "timeperf/eval": "timing_s/testing",
}

TINKER = {
    "env/all/reward/total": "critic/rewards/mean",
    "env/all/ac_tokens_per_turn": "response_length/mean",
    "env/all/turns_per_episode": "num_turns/mean",
    "env/all/by_group/frac_mixed": "batch/effective_frac",
    "test/env/all/reward/total": "val/all/reward",
    "optim/lr": "actor/lr",
    "optim/entropy": "actor/entropy",
    "optim/kl_sample_train_v1": "rollout_corr/kl",
    "time/total": "timing_s/step",
    "time/train": "timing_s/update_actor",
    "time/run_evals": "timing_s/testing",
}
"""Of the Tinker cookbook's `metrics.jsonl`."""

SKYRL = {
    "reward/avg_raw_reward": "critic/rewards/mean",
    "loss/avg_final_rewards": "critic/rewards/mean",
    "generate/avg_num_tokens": "response_length/mean",
    "generate/max_num_tokens": "response_length/max",
    "generate/min_num_tokens": "response_length/min",
    "policy/policy_loss": "actor/pg_loss",
    "policy/policy_entropy": "actor/entropy",
    "policy/policy_kl": "actor/kl_loss",
    "policy/ppo_clip_ratio": "actor/pg_clipfrac",
    "policy/raw_grad_norm": "actor/grad_norm",
    "policy/grad_norm": "actor/grad_norm",
    "policy/policy_lr": "actor/lr",
    "policy/rollout_train_logprobs_abs_diff_mean": "training/logprob_gap/mean",
    "policy/rollout_train_logprobs_abs_diff_max": "training/logprob_gap/max",
    "async/staleness_mean": "training/off_policy/trajectory_staleness/mean",
    "async/staleness_max": "training/off_policy/trajectory_staleness/max",
    "async/staleness_min": "training/off_policy/trajectory_staleness/min",
    "timing/step": "timing_s/step",
    "timing/generate": "timing_s/gen",
    "timing/wait_for_generation_buffer": "timing_s/gen",
    "timing/fwd_logprobs_values_reward": "timing_s/old_log_prob",
    "timing/compute_advantages_and_returns": "timing_s/adv",
    "timing/policy_train": "timing_s/update_actor",
    "timing/sync_weights": "timing_s/update_weights",
    "timing/eval": "timing_s/testing",
    "timing/save_checkpoints": "timing_s/save_checkpoint",
}
"""Of SkyRL, whose `rollout_train_prob_diff_mean` is a mean of ratios, near 1 or anything at all."""

TRL_PPO = {
    "objective/scores": "critic/rewards/mean",
    "objective/kl": "actor/kl_loss",
    "policy/approxkl_avg": "actor/ppo_kl",
    "policy/clipfrac_avg": "actor/pg_clipfrac",
    "policy/entropy_avg": "actor/entropy",
    "loss/policy_avg": "actor/pg_loss",
    "loss/value_avg": "critic/vf_loss",
    "val/clipfrac_avg": "critic/vf_clipfrac",
    "lr": "actor/lr",
}
"""Of TRL's `PPOTrainer` and `RLOOTrainer`, whose `val/` is the value model's or the policy's, never a validation."""

_AGE = "training/off_policy/trajectory_staleness"
PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    *(
        (re.compile(rf"(?:.+/)?sample_staleness(?:_(?:theta|proximal))?[/_]{how}(?:/avg)?"), f"{_AGE}/{what}")
        for how, what in (("avg", "mean"), ("max", "max"), ("min", "min"))
    ),
    (re.compile(r"(?:\w+/)?log_?prob_gap[/_](mean|max|p\d\d)"), r"training/logprob_gap/\1"),
    (re.compile(r"(?:\w+/)?log_?prob_gap[/_](?:median)"), "training/logprob_gap/p50"),
    (re.compile(r"mismatch/mismatch_(.+)"), r"rollout_corr/\1"),
    (re.compile(r"mismatch/(rollout_(?:is|rs)_.+)"), r"rollout_corr/\1"),
    (re.compile(r"rewards?/(chosen|rejected|accuracies|margins)(?:/mean)?"), r"preference/\1"),
    (re.compile(r"rewards/([^/]+)(?:/mean)?"), r"reward/\1/mean"),
    (re.compile(r"rewards/([^/]+)/std"), r"reward/\1/std"),
    (re.compile(r"train/(mis|tis|ois)_(rollout_.+)"), r"rollout_corr/\2"),
    (re.compile(r"eval/([^/]+)-truncated_ratio"), r"val/\1/clip_ratio"),
    (re.compile(r"eval/([^/]+)"), r"val/\1/reward"),
    (re.compile(r"eval-rollout/reward"), "val/all/reward"),
    (re.compile(r"eval/([^/]+)/avg_score"), r"val/\1/reward"),
)
EFFECTIVE = "batch/effective_frac"
OF_AN_ACTOR = re.compile(r"^[a-z]\w*_actor/")
"""AReaL's jobs name their actor after the algorithm."""
ONE_MINUS = {"frac_reward_zero_std": EFFECTIVE}
"""Shares logged the other way round."""
SINCE_THE_START = frozenset({"fully_async/count/dropped_stale_samples"})
"""Counts that go on from step to step, where the catalogue counts those of a step."""
SUMMED = (
    (
        re.compile(r"rollout/dynamic_filter/drop_(?:zero_std|.*std).*"),
        "training/filter_groups/evicted_samples",
    ),
)
"""Families that the catalogue counts as one."""
