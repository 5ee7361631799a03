"""What a log says of its environments under names of its own: every agent framework, and every team, has others. A name
is read by its words, and only where it speaks of an environment, a sandbox or a tool and of one of the few quantities
that the rules know."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rollbook.diagnose.readers.words import pieces_of, word_set
from rollbook.diagnose.series import Series, finite

_OF_ENVS = word_set(
    "env envs environment environments sandbox sandboxes tool tools container containers pod pods lease leases vm vms"
)
_OF_THE_POLICY = word_set(
    "format parse parsing parser syntax answer reward rewards score verifier test tests code compile json schema"
    " invalid success std min p50 p90 p95 p99 median slowest tokens length"
)
"""Words of what the policy gets wrong, or of a statistic that is not the mean."""
_MACHINES = word_set("sandbox sandboxes container containers pod pods vm vms")
_OF_SCORING = word_set("reward rewards score verifier")
"""Who asks: of a machine that fails it says no more."""
_OF_SAMPLES = word_set("rollout rollouts trajectory trajectories episode episodes sample samples")
_FAILS = word_set("fail fails failed failure failures error errors errored lost dead")
_TIME_OUT = word_set("timeout timeouts timed")
_SHARE = word_set("rate ratio frac fraction share frequency")
_SECONDS = word_set("s sec secs second seconds time latency duration")
_CALL = word_set("call calls turn turns step exec execute execution run tool tools")
_GETTING = word_set("create creation acquire acquisition lease spawn start startup checkout boot")
_LIVING = word_set("running open alive live living existing")
"""Words of those in use, or of all that there are where another name says how many are in use."""
_IN_USE = word_set("active leased busy use used occupied assigned") | _LIVING
_OF_A_HOST = word_set("memory mem ram gb mb bytes cpu cpus cores disk gpu")
"""What is used of them is no number of them."""
_CAPACITY = word_set("capacity healthy")


def named_by_words(values: Mapping[str, Series]) -> dict[str, str]:
    """Metric of the catalogue -> the log's own name for it, where the log has it under no known one.

    >>> half = np.full(3, 0.5)
    >>> named_by_words({"env/failure_rate": half, "sandbox_active": 80 * half, "env/format_error": half})
    {'rollout/sandbox_error_ratio': 'env/failure_rate', 'env/num_active': 'sandbox_active'}
    """
    meant = {name: metric for name, series in values.items() if (metric := _meant(name, series)) is not None}
    in_use = [name for name, metric in meant.items() if metric == "env/num_active"]
    if surely := [name for name in in_use if not pieces_of(name) & _LIVING]:
        meant.update({name: "env/num_alive" for name in in_use if name not in surely})
    found: dict[str, str] = {}
    for name, metric in meant.items():
        if metric not in values:
            found.setdefault(metric, name)
    return found


def _meant(name: str, series: Series) -> str | None:
    words = pieces_of(name)
    if words & {"turns"} and not words & _OF_THE_POLICY - {"tokens"} and words <= _ABOUT_TURNS:
        return "num_turns/mean"
    fails = words & (_FAILS | _TIME_OUT)
    of_the_policy = _OF_THE_POLICY - _OF_SCORING if words & _MACHINES and fails else _OF_THE_POLICY
    if words & _OF_SAMPLES and fails & _FAILS and words & _SHARE and not words & (_OF_ENVS | of_the_policy):
        return "failures/frac" if words <= _ABOUT_FAILURES and _is_rare_at_first(series) else None
    if not words & _OF_ENVS or words & of_the_policy:
        return None
    if fails:
        if "max" in words:
            return None
        kind = "timeout" if words & _TIME_OUT else "error"
        if words & _SHARE or _is_a_share(series):
            return "rollout/sandbox_error_ratio" if kind == "error" else "rollout/timeout_sample_ratio"
        return f"env/num_{kind}s"
    if words & _SECONDS:
        if words & _GETTING:
            return "env/acquire_s/mean" if "max" not in words else None
        return f"env/turn_s/{'max' if 'max' in words else 'mean'}" if words & _CALL else None
    if words & _SHARE:
        return None
    if words & _CAPACITY:
        return "env/capacity"
    return "env/num_active" if words & _IN_USE and not words & _OF_A_HOST else None


_ABOUT_TURNS = word_set("num number turns mean avg average rollout rollouts env train multi total count per")


_ABOUT_FAILURES = _OF_SAMPLES | _FAILS | _SHARE | word_set("train mean avg")
RARE = 0.05
"""Share of trajectories up to which they fail now and then: wrong answers, which some logs call errors, are more."""


def _is_rare_at_first(series: Series) -> bool:
    known = finite(series)
    return bool(len(known)) and float(np.median(known[: max(3, len(known) // 5)])) <= RARE


def _is_a_share(series: Series) -> bool:
    """Whether values lie between 0 and 1, and not only at the ends."""
    known = finite(series)
    return bool(len(known)) and bool(np.all((known >= 0) & (known <= 1)) and np.any(known % 1 > 0))
