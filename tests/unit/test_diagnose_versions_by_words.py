"""The version that each replica serves, whatever the log calls it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnose_runs import Array, run_of

from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.version_words import versions_by_words

N = 80
T = np.arange(N, dtype=np.float64)
STANDS = np.minimum(T, 40.0)
NAMES = [
    "engine/{}/version",
    "rollout/replica_{}/weight_version",
    "rollout/weight_version/replica_{}",
    "server-{}.policy_version",
    "dp_rank{}.weights_step",
    "rollout/{}/weightVersion",
    "node_1/worker_{}/current_model_version",
]


def _verdict(name: str, *each: Array) -> tuple[str, int | None]:
    found = diagnose(run_of({name.format(i): versions for i, versions in enumerate(each)}, n=N))
    return found.verdict, found.findings[0].step if found.findings else None


@pytest.mark.parametrize("name", NAMES)
def test_one_that_stands_is_found_under_any_name_of_its_version(name: str) -> None:
    told_late = np.maximum(T - (T % 11 == 10), 0.0)
    assert _verdict(name, T, T, told_late, T) == ("well", None)
    verdict, step = _verdict(name, T, T, STANDS, told_late)
    assert verdict == "version_drift"
    assert step is not None
    assert abs(step - 41) <= 1


@pytest.mark.parametrize(
    "name",
    [
        "engine/{}/version_lag",
        "server_{}/cuda_version_seconds",
        "worker/{}/step",
        "data/{}/version",
        "engine/{}/tokens",
    ],
)
def test_other_numbers_of_replicas_are_no_versions(name: str) -> None:
    assert versions_by_words({name.format(i): T for i in range(4)}) == {}


def test_a_single_name_or_what_is_no_whole_number_is_no_family() -> None:
    assert versions_by_words({"engine/0/version": T}) == {}
    assert versions_by_words({f"engine/{i}/version": T + 0.5 for i in range(4)}) == {}


def test_one_that_takes_the_last_publication_a_little_later_is_not_left_behind() -> None:
    """One in every twenty steps, and the log ends two steps after the last."""
    published = np.where(N - 2 <= T, 80.0, 20.0 * (T // 20))
    late = 20.0 * (np.minimum(T, N - 3) // 20)
    name = "engine/{}/version"
    assert _verdict(name, published, published, late)[0] == "well"
    assert _verdict(name, published, published, np.minimum(late, 20.0))[0] == "version_drift"
