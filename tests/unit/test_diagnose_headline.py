"""What the first lines claim: no more than the log can prove, with what limits a run that has no fault."""

from __future__ import annotations

import numpy as np
import pytest

from rollbook.diagnose.readers.assemble import assemble
from rollbook.diagnose.report import to_text
from rollbook.diagnose.series import Row, RunSeries
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N, dtype=np.float64)
RNG = np.random.default_rng(0)
GAP, SYNC = "training/rollout_probs_diff_mean", "timing_s/update_weights"


def around(level: object, noise: float = 0.03) -> np.ndarray:
    return np.asarray(level, np.float64) * np.exp(RNG.normal(0, noise, N))


def run(format: str = "verl-file", leave_out: tuple[str, ...] = (), **changed: np.ndarray) -> RunSeries:
    values = {
        "critic/score/mean": 0.3 + 0.2 * T / N + RNG.normal(0, 0.01, N),
        GAP: around(np.full(N, 0.004)),
        SYNC: around(np.full(N, 3.0)),
        "response_length/mean": around(np.full(N, 900.0)),
        **{name.replace("__", "/"): series for name, series in changed.items()},
    }
    rows = [
        Row(step=i, data={k: float(v[i]) for k, v in values.items() if k not in leave_out and v[i] == v[i]})
        for i in range(N)
    ]
    return assemble(rows, source="log", format=format)


@pytest.mark.parametrize(
    ("leave_out", "verdict", "says"),
    [
        ((), "well", "NONE OF THESE: the system is well\n"),
        ((GAP,), "well", 'well, as far as it can be judged without "gap of trainer and engine"'),
        (
            (GAP, SYNC),
            "not_judged",
            "NOT JUDGED: nothing wrong shows in what was logged, but that is too little",
        ),
    ],
)
def test_a_missing_signal_is_no_proof(leave_out: tuple[str, ...], verdict: str, says: str) -> None:
    diagnosis = diagnose(run(leave_out=leave_out))
    assert diagnosis.verdict == verdict
    text = to_text(diagnosis)
    assert " ".join(says.split()) in " ".join(text.split())
    assert "none fell to zero" not in text, "no source was logged"


def test_answers_that_grow_until_they_are_cut_off_limit_the_run() -> None:
    progress = np.clip((T - 40) / 70, 0, 1)
    diagnosis = diagnose(
        run(
            critic__score__mean=0.38 - 0.27 * progress + RNG.normal(0, 0.01, N),
            response_length__mean=around(1014 + 6400 * progress),
            response_length__clip_ratio=0.02 + 0.75 * progress,
        )
    )
    assert [state.name for state in diagnosis.states] == ["lengths_explode"]
    assert 36 <= diagnosis.states[0].step <= 52
    moved = [signal.name for signal in diagnosis.signals if signal.verdict == "moved"]
    assert moved == ["reward by source", "staleness, lengths, sync seconds"]
    assert "what limits the run: the answers grow until they are cut off" in " ".join(
        to_text(diagnosis).split()
    )


def test_a_reward_that_is_lost_again_slowly_is_said_and_one_that_wavers_is_not() -> None:
    falls = 0.2 + 0.3 * np.minimum(T / 60, 1) - 0.3 * np.clip((T - 70) / 50, 0, 1)
    assert [s.name for s in diagnose(run(critic__score__mean=around(falls))).states] == ["reward_falls"]
    wavers = around(np.full(N, 0.3), 0.3)
    assert "reward_falls" not in [s.name for s in diagnose(run(critic__score__mean=wavers)).states]


@pytest.mark.parametrize(
    ("format", "names"), [("verl-console", "calculate_log_probs"), ("trl", "TRL"), ("slime", "slime")]
)
def test_a_remedy_is_for_the_framework_that_wrote_the_log(format: str, names: str) -> None:
    missing = diagnose(run(format, leave_out=(GAP,))).not_judged
    told = {judged.rule: judged.collect for judged in missing}
    assert names in told["engine_mismatch"]
    assert ("verl" in " ".join(told.values())) == format.startswith("verl")


def test_a_step_among_samples_of_one_age_is_the_engines_although_no_sample_is_fresh() -> None:
    age = "training/off_policy/trajectory_staleness"
    gap = around(np.where(T >= 60, 0.12, 0.02 + 0.06 * np.exp(-T / 6)), 0.1)
    columns = {f"{age}/{s}": np.minimum(T, 1.0) for s in ("mean", "max", "min")}
    own = np.where(T < 1, 0.0, np.nan)
    series = {"training/logprob_gap_by_staleness/1/mean": gap, "training/logprob_gap/mean": own}
    finding = diagnose(run("rollbook", **columns, **series)).findings[0]
    assert (finding.rule, finding.step) == ("engine_mismatch", 60)


def test_fresh_samples_alone_tell_where_stale_ones_are_trained() -> None:
    age = "training/off_policy/trajectory_staleness"
    columns = {f"{age}/{s}": np.minimum(T, 2.0) for s in ("mean", "max", "min")}
    moves = {
        "training/logprob_gap_all/mean": around(np.full(N, 0.2), 0.4),
        GAP: around(np.full(N, 0.03), 0.4),
    }
    own = {"training/logprob_gap/mean": around(np.where(T >= 60, 0.05, 0.002))}
    finding = diagnose(run("rollbook", **columns, **moves, **own)).findings[0]
    assert (finding.rule, finding.step) == ("engine_mismatch", 60)


def test_a_fault_that_came_and_went_shows_its_peak_and_the_step_where_it_began() -> None:
    spike = np.where((T >= 60) & (T < 72), 1 + 0.5 * (T - 59), 1.0)
    finding = diagnose(run(training__rollout_probs_diff_mean=around(0.004 * spike))).findings[0]
    assert finding.rule == "missed_weight_sync"
    assert abs(finding.step - 60) <= 2
    assert finding.evidence[0].after is not None
    assert finding.evidence[0].after > 0.02


def test_a_slow_ramp_is_dated_where_it_begins() -> None:
    slow = np.clip((T - 40) / 80, 0, 1)
    finding = diagnose(
        run(
            num_turns__mean=around(np.full(N, 6.0)),
            env__turn_s__mean=around(3 * (1 + 4 * slow), 0.05),
            perf__cpu_memory_used_gb=around(210 + 400 * slow, 0.01),
            timing_s__gen=around(60 * (1 + 1.5 * slow)),
        )
    ).findings[0]
    assert finding.rule == "sandbox_leak"
    assert abs(finding.step - 40) <= 6


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({SYNC: around(np.where(T >= 60, 30.0, 3.0))}, "a publication takes 10"),
        ({"timing_s/gen": around(np.where(T >= 60, 90.0, 50.0))}, "generation takes 1.8"),
    ],
)
def test_a_stage_that_became_slower_is_said_beside_the_proof(
    changed: dict[str, np.ndarray], says: str
) -> None:
    usual = {"timing_s/gen": around(np.full(N, 50.0)), "timing_s/update_actor": around(np.full(N, 40.0))}
    diagnosis = diagnose(run(**{**usual, **changed}))
    text = " ".join(to_text(diagnosis).split())
    assert diagnosis.is_well
    assert 'the system is well, but look at "staleness, lengths, sync seconds", which moved' in text
    assert says in text and "since step 60" in text
    assert "but look at" not in to_text(diagnose(run(**usual)))


def test_a_gap_that_one_metric_shows_to_have_grown_is_not_called_well() -> None:
    age = 1.0 + 6.0 * np.clip((T - 40) / 60, 0, 1)
    columns = {f"training/off_policy/trajectory_staleness{w}/mean": around(age, 0.02) for w in ("", "_worst")}
    still = {f"rollout_corr/{name}": around(np.full(N, 0.001)) for name in ("kl", "k3_kl")}
    gap = {GAP: around(0.006 * age**0.7), **still}
    signals = {signal.name: signal.verdict for signal in diagnose(run(**columns, **gap)).signals}
    assert signals["gap of trainer and engine"] == "moved"


def test_data_are_exhausted_where_the_held_out_score_falls_back_or_stops_to_follow() -> None:
    """Twelve passes in each: noise below the best score ever, or a task too hard to begin, is no sign of it."""

    def states(reward: np.ndarray, held_out: np.ndarray) -> list[str]:
        sparse = np.where(T % 5 == 4, held_out + RNG.normal(0, 0.02, N), np.nan)
        passes = np.floor(T / 10)
        changed = {"critic/score/mean": reward + RNG.normal(0, 0.015, N), "training/epoch": passes}
        return [s.name for s in diagnose(run(**changed, **{"val-core/math/acc/mean@8": sparse})).states]

    rises = 0.2 + 0.4 * T / N
    assert states(rises, rises) == []
    assert states(np.full(N, 0.05), np.full(N, 0.06)) == ["plateau"]
    assert states(rises, np.minimum(rises, 0.3)) == ["data_exhausted"]
    assert states(rises, 0.4 - 0.2 * np.clip((T - 50) / 70, 0, 1)) == ["data_exhausted"]


def test_a_signal_that_no_state_explains_is_named_beside_what_limits_the_run() -> None:
    """The gap grows as the distance of the policy's own steps does (the root of their KL), so no rule takes it for a
    missed sync; all the same it moved."""
    grows = np.clip(T - 60, 0, None)
    diagnosis = diagnose(
        run(
            critic__score__mean=np.full(N, 0.45) + np.random.default_rng(1).normal(0, 0.01, N),
            actor__ppo_kl=around(2e-4 + 3e-4 * grows),
            **{GAP.replace("/", "__"): around(0.004 * np.sqrt(1 + 1.5 * grows))},
        )
    )
    assert [state.name for state in diagnosis.states] == ["plateau"]
    moved = 'the system is well, but look at "gap of trainer and engine", which moved; what limits the run: '
    assert moved in " ".join(to_text(diagnosis).split())


def test_the_top_of_a_score_is_the_best_that_an_answer_ever_got() -> None:
    """Nearly every answer gets the 0.1 of its format, few the 1.0 of passing tests; the reward lacks the KL term."""
    best = np.where(T % 3 == 0, 1.0, 0.1)
    level = 0.11 + 0.0 * T + RNG.normal(0, 0.004, N)
    diagnosis = diagnose(
        run(critic__score__mean=level, critic__score__max=best, critic__rewards__max=best - 0.02)
    )
    assert "reward_saturates" not in [state.name for state in diagnosis.states]


@pytest.mark.parametrize(
    ("format", "is_told"),
    [("verl-console", True), ("tensorboard", True), ("wandb", True)]
    + [(other, False) for other in ("prime-rl", "areal", "slime", "trl", "rollbook")],
)
def test_only_where_a_log_may_be_verls_its_reader_is_told_how_verl_logs_it(
    format: str, is_told: bool
) -> None:
    text = to_text(diagnose(run(format, leave_out=(GAP,))), tells_all=True)
    assert "could not be judged" in text
    assert ("(verl" in text) == is_told


def test_a_task_that_is_solved_is_no_collapse_of_the_entropy() -> None:
    """What is trained are the groups that are not yet all right: their mean stays at 0.84. All that was generated says
    that the task is solved, and a solved task is answered alike."""
    solved = {
        "critic__score__mean": np.minimum(0.4 + 0.01 * T, 0.84),
        "critic__score__max": np.full(N, 1.0),
        "actor__entropy": np.maximum(0.5 - 0.01 * T, 0.03),
    }
    generated = {"reward/reverse/mean": np.minimum(0.4 + 0.012 * T, 0.998)}
    assert [s.name for s in diagnose(run(**solved)).states] == ["entropy_collapse"]
    whole = diagnose(run(**solved, **generated))
    assert [s.name for s in whole.states] == ["reward_saturates"]
    assert "0.998 now" in whole.signals[0].says, "the proof names the same reward as the state"


def _by_source(seed: int, level: np.ndarray) -> np.ndarray:
    """[N] mean of 64 answers that are right with that share."""
    return np.random.default_rng(seed).binomial(64, level) / 64


@pytest.mark.parametrize("since", [10, 60, 110])
def test_a_source_that_died_is_never_among_those_of_which_none_fell_to_zero(since: int) -> None:
    lives = np.full(N, 0.5)
    diagnosis = diagnose(
        run(reward__math__mean=_by_source(1, lives), reward__code__mean=_by_source(2, lives) * (since > T))
    )
    says = diagnosis.signals[0].says
    assert "at zero now: reward/code/mean" in says and "none fell" not in says


def test_a_hard_source_without_a_right_answer_in_its_last_steps_is_not_called_dead() -> None:
    hard = _by_source(3, np.full(N, 0.01))
    hard[-4:] = 0.0
    diagnosis = diagnose(run(reward__math__mean=_by_source(1, np.full(N, 0.5)), reward__hard__mean=hard))
    assert diagnosis.signals[0].says.endswith("2 sources logged, zeros come as often as before")


def test_a_gap_that_is_wide_all_along_has_not_moved() -> None:
    """What engines in 8 bits bring from the first step on: one metric beyond the usual of bfloat16, none within."""
    for level, verdict in (
        (around(np.full(N, 0.03)), "well"),
        (around(0.004 * (1 + 6.5 * (T >= 60))), "moved"),
    ):
        wide = {GAP: level, "rollout_corr/kl": around(level**2 * 15, 0.1)}
        gap = next(s for s in diagnose(run(**wide)).signals if s.name == "gap of trainer and engine")
        assert (gap.verdict, "8 bits" in gap.says) == (verdict, verdict == "well")
