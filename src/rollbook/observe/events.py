"""The kinds of line in events.jsonl and the fields that readers (page, trace, diagnosis) look for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventKind:
    """One kind of event; other fields may stand beside the named ones."""

    fields: tuple[str, ...]
    meaning: str


EVENT_KINDS: dict[str, EventKind] = {
    "run_started": EventKind((), "A new run took the directory."),
    "run_resumed": EventKind((), "A later process took the directory up again."),
    "already_complete": EventKind(("num_steps_done",), "The run that was taken up has no step left to make."),
    "threads": EventKind(
        ("trainer", "engine"),
        "With how many threads trainer and engines compute in this process, as a replay will.",
    ),
    "no_effect": EventKind(
        ("option", "value", "needs", "says"),
        "An option was set that this run does not read; `needs` is what it has an effect with.",
    ),
    "run_failed": EventKind(("error", "remedy"), "The run stopped on an error; it can be resumed."),
    "interrupted": EventKind(
        ("effect", "remedy"),
        "Ctrl-C or a termination signal arrived; what it does, and what the next one does.",
    ),
    "warmup": EventKind(
        ("update", "num_updates", "loss"), "One update of the supervised warm-up, of at most `num_updates`."
    ),
    "warmup_check": EventKind(("exact_match",), "Held-out exact match during the warm-up, a value a source."),
    "run_ended": EventKind(("unwritten_metrics",), "The process left the directory in order."),
    "span_open": EventKind(
        ("name", "span_id", "expected_s"),
        "A step, a stage or a phase outside the steps began: a hung run shows what it was in.",
    ),
    "span": EventKind(
        (
            "name",
            "span_id",
            "parent_id",
            "track",
            "duration_s",
            "expected_s",
            "bytes",
            "expected_bytes",
            "tokens",
            "error",
            "attrs",
        ),
        "A span ended; `at_s` and `mono_s` are its start.",
    ),
    "step_failed": EventKind(
        ("error", "metrics"), "A step ended in an error; its readings stand here and nowhere else."
    ),
    "publication": EventKind(
        (
            "weight_version",
            "base_version",
            "num_bytes",
            "sent_bytes",
            "num_tensors",
            "changed_frac",
            "total_s",
            "committed",
            "quarantined",
            "digest",
        ),
        "A weight publication was committed by the replicas named.",
    ),
    "publication_failed": EventKind(
        ("weight_version", "error"), "A weight publication failed; it is repeated once."
    ),
    "quarantined": EventKind(
        ("replica_id", "why"), "A replica is out of service until a publication is proven."
    ),
    "back_in_service": EventKind(
        ("replica_id",), "A quarantined replica was re-synced in full and serves again."
    ),
    "lent": EventKind(
        ("replica_id", "weight_version", "expected_wait_s", "up_s", "num_moved"),
        "An engine on the trainer's device serves while the trainer waits; `num_moved` requests were given to it.",
    ),
    "taken_back": EventKind(
        ("replica_id", "lent_s", "back_s", "saved_s", "num_tokens", "num_returned", "is_late"),
        "The trainer has its device again; unfinished responses go on at other replicas. `saved_s` is against the pace "
        "of waits without a lending, and negative where it made the wait longer.",
    ),
    "lending_cut_short": EventKind(
        ("replica_id", "back_s"), "The groups were there before the engine on the trainer's device served."
    ),
    "lending_pays": EventKind(
        ("says",), "Waits with a lending were measured to be faster, for the first time or again."
    ),
    "lending_judged": EventKind(
        ("pays", "lent_tokens_per_s", "alone_tokens_per_s", "num_lent", "num_alone", "num_waits_held"),
        "Waits with a lending were compared with waits without; the faster kind is kept for `num_waits_held` waits.",
    ),
    "lending_failed": EventKind(
        ("replica_id", "why"), "The engine on the trainer's device failed: nothing is lent any more."
    ),
    "mismatch": EventKind(
        ("mismatch", "error_frac"),
        "Engines sample from weights rounded on purpose; `error_frac` is relative, by replica.",
    ),
    "probe_failed": EventKind(
        ("replica_id", "weight_version", "why"),
        "A replica holds the right bytes and gives other logprobs than the trainer; it serves nothing until re-synced.",
    ),
    "preflight": EventKind(
        ("signals", "notes", "trial_reward", "trial_response_tokens"),
        "The checks before the first step passed.",
    ),
    "measuring": EventKind(
        ("what", "part", "num_parts"),
        "Calibration before the plan came to its next part; parts that need no measurement are passed over.",
    ),
    "plan": EventKind(
        ("topology", "stages", "step_s", "total_s"),
        "What the ledger expects before the first step: seconds of each stage in the mean of all steps, of a step, and "
        "of all steps that are left.",
    ),
    "memory": EventKind(
        ("point", "device", "allocated_bytes", "reserved_bytes", "free_bytes", "owners"),
        "Device memory at one point of a hand-over; `owners` maps owner to bytes.",
    ),
    "eviction": EventKind(
        ("group_id", "reason", "staleness_steps", "num_response_tokens"),
        "A group left the buffer untrained.",
    ),
    "failure": EventKind(
        ("failure", "source", "num_trajectories", "group_id", "member_idx", "turn_idx", "message"),
        "Trajectories of a step that have no reward: one line a kind and source, in the first one's own words.",
    ),
    "drill": EventKind(
        ("fault", "at_step", "says"),
        "This run is a drill: a fault was put in on purpose, there from a step on.",
    ),
    "finding": EventKind(
        ("rule", "summary", "remedy", "severity", "evidence", "cost_s"), "A diagnosis made during the run."
    ),
    "checkpoint": EventKind(("path", "num_bytes"), "The RL state is on disk, whole."),
    "checkpoint_failed": EventKind(
        ("num_steps_done", "error"), "A checkpoint could not be written; it is tried once more."
    ),
    "empty_batch": EventKind(
        ("evictions",), "Failures and filters left nothing to train: the step made no update."
    ),
    "nonfinite": EventKind(
        ("metrics",), "Metrics of the step that were NaN or infinite (null in metrics.jsonl)."
    ),
    "sink_failed": EventKind(
        ("sink", "error", "left_out"), "A tracker failed; after three failures in a row it is left out."
    ),
    "repair": EventKind(
        ("file", "fragment"), "A line cut short by a killed process was removed; this is what it held."
    ),
}
