"""Alert rules for Prometheus, with the thresholds of the duty manual.

`ALERTS` is the one table of thresholds: the duty manual prints it, `rollbook alerts` writes it as rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rollbook.observe.prometheus import exported_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits beyond which somebody is woken. The defaults suit a bf16 job; a config's own values replace them."""

    max_staleness_steps: int = 1
    """The job's `buffer.max_staleness_steps`."""
    max_logprob_gap_nats: float = 0.05
    """Mean logprob gap at one version: bf16 kernels differ by 0.001 to 0.03, fp32 by 1e-5."""
    max_failed_frac: float = 0.05
    min_sandbox_frac: float = 0.7
    """Sandboxes alive against the most seen in the last hours."""
    max_truncated_frac: float = 0.3
    min_kept_frac: float = 0.3
    """Groups that pass the filters; below it most of the generation is thrown away."""
    max_train_idle_frac: float = 0.5
    max_tail_frac: float = 0.5
    """Tail of the rollout against the whole of it."""
    min_wait_frac: float = 0.25
    """Share of the step that waits for the rollout, from which on its tail matters."""
    max_fragmented_frac: float = 0.3
    max_preempted_frac: float = 0.05
    """Preemptions against finished trajectories."""
    min_eff_sample_size: float = 0.3
    max_step_ratio: float = 1.5
    """Measured step seconds against the plan."""
    max_sync_ratio: float = 3.0
    stalled_steps: float = 5.0
    """Steps' worth of seconds without a finished step."""
    stalled_s: float = 600.0
    """And at least this long."""
    first_step_s: float = 3600.0
    """From the start to the end of the first step, calibration and warm-up included."""
    gone_s: int = 1800
    """How long a run whose endpoint is gone is told about."""
    min_disk_free_bytes: float = 10e9
    max_length_growth: float = 2.0
    """Longest responses against a few hours ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule: what is wrong, how it is seen, and what to do first."""

    name: str
    expr: Callable[[Thresholds], str]
    for_s: int
    """Seconds it must hold before it fires."""
    severity: Literal["page", "ticket"]
    """page: wakes somebody; ticket: can wait for the morning."""
    summary: str
    action: str
    next_check: str


def _m(name: str) -> str:
    return exported_name(name)


def _exceeds(part: str, limit: float, whole: str, on: str = "run") -> str:
    # Series differ in their label `metric`, so vectors are matched on what they share.
    return f"{_m(part)} > on({on}) ({limit} * {_m(whole)})"


ALERTS: list[Alert] = [
    Alert(
        name="RunStalled",
        expr=lambda t: (
            f"time() - {_m('last_step_time_seconds')} > on(run) "
            f"clamp_min({t.stalled_steps} * {_m('timing_s/step')}, {t.stalled_s})"
        ),
        for_s=0,
        severity="page",
        summary="No step has finished for several steps' worth of time.",
        action="Look at the open spans of the run: the last span_open without an end names the stage that hangs.",
        next_check="A rank missing from a collective, a dead engine, or a sandbox that never answers.",
    ),
    Alert(
        name="NoFirstStep",
        expr=lambda t: (
            f"time() - {_m('run_start_time_seconds')} > {t.first_step_s} unless on(run) {_m('last_step_time_seconds')}"
        ),
        for_s=0,
        severity="page",
        summary="The run has started and not finished a step for an hour.",
        action="Look at the open spans of the run: the last span_open without an end names the phase that hangs.",
        next_check="A rank missing from the first collective, or a warm-up that is meant to take this long.",
    ),
    Alert(
        name="RunGone",
        # The last step may end between two scrapes, so its number need not have been seen.
        expr=lambda t: (
            f"last_over_time({_m('training/global_step')}[{t.gone_s}s]) + 2 < on(run) "
            f"last_over_time({_m('run_num_steps')}[{t.gone_s}s]) unless on(run) {_m('run_start_time_seconds')}"
        ),
        for_s=120,
        severity="page",
        summary="A run's endpoint is gone before its last step: the process ended or cannot be reached.",
        action="rollbook diagnose RUN says what it stopped on; rollbook train --resume RUN takes it up again.",
        next_check="Whether the process lives; the host's kernel log, when it died without a word.",
    ),
    Alert(
        name="VersionDrift",
        expr=lambda t: (
            f"max by(run) ({_m('replica/{replica_id}/weight_version')}) - "
            f"min by(run) ({_m('replica/{replica_id}/weight_version')}) > {max(1, t.max_staleness_steps)}"
        ),
        for_s=60,
        severity="page",
        summary="A replica serves weights that the others have left behind.",
        action="Quarantine the replica with the lowest version and publish to it again.",
        next_check="The publication and commit events of that replica.",
    ),
    Alert(
        name="PublicationFailed",
        expr=lambda t: f"{_m('sync/num_failed')} > 0",
        for_s=0,
        severity="page",
        summary="A weight publication failed; its replicas are out of service.",
        action="Read the error of the publication event: it names the tensor or the replica.",
        next_check="Host memory and the transport; a failure on one replica alone points at its host.",
    ),
    Alert(
        name="ReplicaOutOfService",
        expr=lambda t: f"{_m('replica/num_quarantined')} > 0",
        for_s=300,
        severity="ticket",
        summary="A replica has been quarantined for minutes.",
        action="Restart it; it returns to service once a publication is proven.",
        next_check="Its last engine_state event gives the reason.",
    ),
    Alert(
        name="EngineMismatch",
        expr=lambda t: f"{_m('training/logprob_gap/mean')} > {t.max_logprob_gap_nats}",
        for_s=0,
        severity="page",
        summary="Engine and trainer disagree about tokens of the same weight version.",
        action="Compare the gap by replica: one replica means its weights, all of them mean numerics or sampling.",
        next_check="Temperature and quantisation on both sides, then the probe after the next publication.",
    ),
    Alert(
        name="StalenessBeyondBound",
        expr=lambda t: (
            f"{_m('training/off_policy/trajectory_staleness_worst/max')} > {t.max_staleness_steps}"
        ),
        for_s=0,
        severity="page",
        summary="A token older than the bound was trained.",
        action="Stop: the bound is strict, so this is a defect of the program. Keep the run directory.",
        next_check="The versions of the trajectories of that step.",
    ),
    Alert(
        name="ImportanceWeightsCollapsed",
        expr=lambda t: f"{_m('rollout_corr/rollout_is_eff_sample_size')} < {t.min_eff_sample_size}",
        for_s=600,
        severity="ticket",
        summary="Few tokens carry most of the importance weight.",
        action="Lower max_staleness_steps or the learning rate.",
        next_check="The gap by staleness: growth with age is the policy's movement, a constant is numerics.",
    ),
    Alert(
        name="SandboxPoolShrinking",
        expr=lambda t: (
            f"{_m('env/capacity')} < {t.min_sandbox_frac} * max_over_time({_m('env/capacity')}[6h])"
        ),
        for_s=60,
        severity="page",
        summary="Sandboxes have died and did not come back.",
        action="Restart the environment service; failed trajectories are not trained meanwhile.",
        next_check="Disk, file handles and process limits of the sandbox hosts.",
    ),
    Alert(
        name="TrajectoriesFail",
        expr=lambda t: f"{_m('failures/frac')} > {t.max_failed_frac}",
        for_s=60,
        severity="page",
        summary="Trajectories fail; they are not trained, and not counted as zeros.",
        action="Look at failures by kind and source: one kind names the part, one source names the data.",
        next_check="The failure events hold the messages.",
    ),
    Alert(
        name="SourceAllZero",
        expr=lambda t: (
            f"{_m('reward/{source}/zero_frac')} == 1 and {_m('reward/{source}/zero_frac')} offset 1h < 0.9"
        ),
        for_s=120,
        severity="page",
        summary="Every reward of one data source became zero.",
        action="Score a reference answer of that source by hand: the scorer should give full marks.",
        next_check="What changed in the scorer, its sandbox, or the answer format.",
    ),
    Alert(
        name="NotANumber",
        expr=lambda t: f"{_m('observe/nonfinite_metrics')} > 0",
        for_s=0,
        severity="page",
        summary="A metric became NaN or infinite.",
        action="Find the first one in the nonfinite events; stop if it is a loss or a gradient.",
        next_check="The logprob gap and the importance weights of the step before.",
    ),
    Alert(
        name="FilterStarvation",
        expr=lambda t: f"{_m('filter/kept_frac')} < {t.min_kept_frac}",
        for_s=900,
        severity="ticket",
        summary="Most groups teach nothing and are dropped.",
        action="Prompts are too easy or too hard for the policy: change the mix.",
        next_check="Reward by source, and the share of zeros.",
    ),
    Alert(
        name="Truncation",
        expr=lambda t: f"{_m('generated/clip_ratio')} > {t.max_truncated_frac}",
        for_s=900,
        severity="ticket",
        summary="Responses run into the token limit.",
        action="Raise the limit or shape the reward against length.",
        next_check="Whether reward falls with length.",
    ),
    Alert(
        name="LengthGrowth",
        expr=lambda t: (
            f"{_m('generated/response_length/p99')} > {t.max_length_growth} * "
            f"{_m('generated/response_length/p99')} offset 3h"
        ),
        for_s=900,
        severity="ticket",
        summary="The longest responses have doubled within hours: memory and tail will follow.",
        action="Check the memory at the three points of a hand-over and lower micro_batch_tokens in time.",
        next_check="Free device memory under training.",
    ),
    Alert(
        name="TrainerStarves",
        expr=lambda t: (
            f'{_m("idle_frac/{side}")}{{side="train"}} > {t.max_train_idle_frac} and on(run) '
            + _exceeds("timing_s/gen", t.max_train_idle_frac, "timing_s/step")
        ),
        for_s=900,
        severity="ticket",
        summary="The trainer's devices do nothing, and its loop waits for trajectories, more than half of the time.",
        action="Where the engines are busy, move GPUs to the rollout side or raise the admission budget.",
        next_check="Where the engines idle as well: environment seconds, tail, preemptions and the buffer's gauges.",
    ),
    Alert(
        name="TailBurst",
        expr=lambda t: (
            _exceeds("rollout/tail_s", t.max_tail_frac, "timing_s/gen")
            + " and on(run) "
            + _exceeds("timing_s/gen", t.min_wait_frac, "timing_s/step")
        ),
        for_s=900,
        severity="ticket",
        summary="Most of the rollout waits for the last few trajectories.",
        action="Use an asynchronous schedule, or cap the responses.",
        next_check="Turns and environment seconds: a slow sandbox makes a tail too.",
    ),
    Alert(
        name="KVPoolFull",
        expr=lambda t: _exceeds(
            "rollout/num_preemptions", t.max_preempted_frac, "generated/num_trajectories"
        ),
        for_s=900,
        severity="ticket",
        summary="Running sequences are evicted from the KV pool and computed again.",
        action="Lower the slots of a replica or give the pool more memory.",
        next_check="Use of the KV pool by replica, and tokens/s before and after.",
    ),
    Alert(
        name="MemoryFragmentation",
        expr=lambda t: _exceeds(
            "memory/{point}/fragmented_bytes",
            t.max_fragmented_frac,
            "memory/{point}/reserved_bytes",
            "run, point",
        ),
        for_s=900,
        severity="ticket",
        summary="Device memory is reserved and cannot be used.",
        action="Use expandable segments, or empty the cache at the hand-over.",
        next_check="Whether it grows from step to step.",
    ),
    Alert(
        name="DiskNearlyFull",
        expr=lambda t: f"{_m('host/disk_free_bytes')} < {t.min_disk_free_bytes:g}",
        for_s=60,
        severity="page",
        summary="The disk of the run directory is nearly full.",
        action="Delete old checkpoints; the run stops with a clear error when nothing can be written.",
        next_check="Size of trajectories/ and checkpoints/.",
    ),
    Alert(
        name="SlowerThanPlanned",
        expr=lambda t: _exceeds("timing_s/step", t.max_step_ratio, "expected_s/step"),
        for_s=1800,
        severity="ticket",
        summary="Steps take longer than the plan says.",
        action="rollbook reconcile RUN names the stage that lost the seconds.",
        next_check="The waterfall of the whole-step MFU.",
    ),
    Alert(
        name="SyncSlow",
        expr=lambda t: _exceeds("timing_s/update_weights", t.max_sync_ratio, "expected_s/update_weights"),
        for_s=900,
        severity="ticket",
        summary="Weight publication takes several times what the plan says.",
        action="Compare the commit events by replica: one slow host or a slow link.",
        next_check="Export, write and digest seconds.",
    ),
]


def to_rules(thresholds: Thresholds | None = None) -> str:
    """The rules file for Prometheus, as YAML (strings quoted as JSON, which YAML reads)."""
    thresholds = thresholds or Thresholds()
    lines = ["groups:", "  - name: rollbook", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr(thresholds))}",
            f"        for: {alert.for_s}s",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          action: {json.dumps(alert.action)}",
            f"          next_check: {json.dumps(alert.next_check)}",
        ]
    return "\n".join(lines) + "\n"
