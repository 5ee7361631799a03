"""A part of the sandboxes is gone: those that are left are all in use, and fewer than were needed before."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnose_runs import Array, noisy, run_of

from rollbook.diagnose.env_words import named_by_words
from rollbook.diagnose.tree import diagnose

N = 40
GONE = np.arange(N) >= 22
NEEDED = np.round(noisy(98.0, 50, 0.04, n=N))
LEFT = np.where(GONE, 65.0, 120.0)
NAMES = [
    ("sandbox/alive", "sandbox/in_use"),
    ("sandbox/num_running_containers", "sandbox/num_busy_containers"),
    ("env/pods_alive", "env/pods_used"),
    ("env/capacity", "env/num_active"),
    ("env/num_leased", "env/num_active"),
]


def _verdict(
    names: tuple[str, str], living: Array, used: Array, call_s: Array | None = None
) -> tuple[str, int | None]:
    values = dict(zip(names, (living, used), strict=True)) | {"num_turns/mean": noisy(6.0, 51, n=N)}
    values |= {"env/call_s/mean": call_s} if call_s is not None else {}
    found = diagnose(run_of(values, n=N))
    return found.verdict, found.findings[0].step if found.findings else None


@pytest.mark.parametrize("names", NAMES[:4])
def test_those_that_are_left_are_too_few(names: tuple[str, str]) -> None:
    used = np.minimum(NEEDED, LEFT)
    assert _verdict(names, LEFT, used) == ("dead_sandbox_pool", 23)
    waits = noisy(5.0, 52, 0.15, n=N) * np.where(GONE, 1.5, 1.0)
    assert _verdict(names, LEFT, used, waits) == ("dead_sandbox_pool", 23)


@pytest.mark.parametrize("names", NAMES[:4])
@pytest.mark.parametrize(
    ("living", "used"),
    [
        (np.full(N, 120.0), NEEDED),
        (LEFT, np.minimum(np.where(GONE, 50.0, 1.0) * NEEDED / np.where(GONE, 98.0, 1.0), LEFT)),
        (np.where(GONE, 104.0, 120.0), np.minimum(NEEDED, 104.0)),
    ],
    ids=["as ever", "less to do", "some spare ones"],
)
def test_a_smaller_pool_that_is_large_enough_is_well(
    names: tuple[str, str], living: Array, used: Array
) -> None:
    assert _verdict(names, living, used)[0] == "well"


def test_where_calls_wait_no_longer_there_was_less_to_do() -> None:
    """A pool that is scaled to what is asked of it, to the last sandbox."""
    used = np.where(GONE, 65.0, NEEDED)
    assert _verdict(NAMES[0], LEFT, used, noisy(5.0, 52, 0.05, n=N))[0] == "well"


def test_what_is_used_of_a_hosts_memory_is_no_number_of_sandboxes() -> None:
    values = dict.fromkeys(("env/pods_used", "sandbox/memory_used_gb", "env/cpu_cores_in_use"), LEFT)
    assert list(named_by_words(values).values()) == ["env/pods_used"]
