"""What a watch, a dump of stacks or a service says about a run that stands, or whose sandboxes are gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.diagnose_runs import noisy, run_of

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.series import Event
from rollbook.diagnose.tree import diagnose

N = 40
KILLED = "slurmstepd: error: *** JOB 81 ON node-1 CANCELLED AT 2026-03-04T22:00:00 DUE TO TIME LIMIT ***"


def _verdict(tmp_path: Path, lines: list[str], *, more_steps: int = 0, step_s: float = 105.0) -> str:
    """Of a healthy run whose last steps come after the lines."""
    rng = np.random.default_rng(3)

    def step(i: int) -> str:
        return (
            f"(TaskRunner pid=81) step:{i} - critic/rewards/mean:{0.4 + 0.002 * i:.4f} - actor/entropy:0.4 - "
            f"actor/grad_norm:{rng.normal(0.2, 0.01):.4f} - response_length/mean:{rng.normal(800, 20):.1f} - "
            f"training/rollout_probs_diff_mean:{rng.normal(0.006, 1e-4):.6f} - "
            f"timing_s/gen:{rng.normal(step_s / 2, 1):.2f} - timing_s/update_actor:{rng.normal(40, 1):.2f} - "
            f"timing_s/update_weights:4.0 - timing_s/step:{rng.normal(step_s, 1):.2f}"
        )

    log = [*map(step, range(1, N + 1)), *lines, *map(step, range(N + 1, N + 1 + more_steps))]
    path = tmp_path / "run.log"
    path.write_text("\n".join(log) + "\n")
    return diagnose(load(str(path))).verdict


def _watch(phase: str, *, last_s: int) -> list[str]:
    """Lines of which only the seconds tell: ranks and watts waver."""
    seconds = [s for s in (600, 1200, 1800, 3600, 5400, 7200) if s <= last_s]
    return [
        f"[job-watch] no new step for {s} s; phase={phase}; ranks returned {31 - i % 2}/32; power {120 + 7 * i} W"
        for i, s in enumerate(seconds)
    ]


def test_a_watch_that_counts_the_seconds_since_a_step_tells_a_hang(tmp_path: Path) -> None:
    assert _verdict(tmp_path, _watch("update_actor", last_s=3600)) == "collective_hang"


@pytest.mark.parametrize(
    ("phase", "verdict"), [("update_actor", "collective_hang"), ("rollout", "well"), ("validation", "well")]
)
def test_a_stage_that_is_named_is_judged_by_its_own_seconds(tmp_path: Path, phase: str, verdict: str) -> None:
    """A step takes half an hour, of which the update has 40 s."""
    assert _verdict(tmp_path, _watch(phase, last_s=5400), step_s=1800.0) == verdict


def test_a_watch_that_was_followed_by_steps_is_none(tmp_path: Path) -> None:
    assert _verdict(tmp_path, _watch("update_actor", last_s=3600), more_steps=10) == "well"


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        (
            "watchdog: step 41 has not completed, elapsed={0}s, rank 3 at 31/32, power={1} W, util {2} %",
            "collective_hang",
        ),
        ("step 41 still running on all ranks after {0} s ({1} MHz)", "collective_hang"),
        ("step 41 still running on all ranks after {0} s, {2}/99 micro batches done", "well"),
    ],
)
def test_watts_and_clocks_are_no_movement_and_counts_of_work_are(
    tmp_path: Path, says: str, verdict: str
) -> None:
    lines = [says.format(600 * (i + 1), 1200 + 7 * (i % 3), 90 + i) for i in range(6)]
    assert _verdict(tmp_path, lines) == verdict


@pytest.mark.parametrize(("running", "verdict"), [(0, "buffer_never_fills"), (4, "well")])
def test_a_wait_for_a_count_with_nothing_running_needs_no_usual_seconds(
    tmp_path: Path, running: int, verdict: str
) -> None:
    """In AReaL's words; a step takes an hour and a half."""
    seconds = (600, 955, 4555, 8155, 11755)
    lines = [f"INFO: wait(count=512): accepted 508, running {running}, elapsed {s}s" for s in seconds]
    assert _verdict(tmp_path, lines, step_s=5400.0) == verdict


STACKS = {
    "py-spy in a line": "py-spy rank {}: all_reduce (torch/distributed/distributed_c10d.py:2810) < sync < update_actor",
    "py-spy's dump": "    all_gather_into_tensor (torch/distributed/distributed_c10d.py:{})",
    "faulthandler": '  File "/usr/lib/torch/distributed/distributed_c10d.py", line {} in barrier',
}  # fmt: skip


@pytest.mark.parametrize("line", STACKS.values(), ids=STACKS)
def test_a_run_that_was_killed_while_its_ranks_stood_in_a_collective_hung(tmp_path: Path, line: str) -> None:
    stacks = [line.format(rank) for rank in range(4)]
    assert _verdict(tmp_path, [*stacks, KILLED]) == "collective_hang"
    assert _verdict(tmp_path, [KILLED]) == "run_stopped"
    assert _verdict(tmp_path, stacks, more_steps=10) == "well"  # somebody looked


def _with_calls_that_fail(scorer_s: float, *, num: int = 20, reward: float = 1.0) -> str:
    at = np.arange(120) >= 60
    text = "[Request ID: 4] Sandbox API call failed. Last error: Max retries exceeded with url: /run_code"
    events = tuple(Event(kind="sandbox_failure", step=60 + 3 * i, text=text, fields={}) for i in range(num))
    changed = {
        "timing_s/reward": noisy(3.0, 21) * np.where(at, scorer_s / 3.0, 1.0),
        "critic/score/mean": (0.2 + np.arange(120) / 400) * np.where(at, reward, 1.0) + noisy(0.02, 22, 0.5),
    }
    return diagnose(run_of(changed, events=events)).verdict


def test_calls_that_fail_in_numbers_while_scoring_waits_are_of_a_dead_pool() -> None:
    """However the reward rises on: what is scored without a sandbox goes on."""
    assert _with_calls_that_fail(120.0) == "dead_sandbox_pool"
    assert _with_calls_that_fail(3.0, reward=0.6) == "dead_sandbox_pool"
    assert _with_calls_that_fail(3.0) == "well"  # they were tried again
    assert _with_calls_that_fail(3.0, num=4) == "well"


def test_the_words_of_a_sandbox_api_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    said = (
        "ERROR:[Request ID: 4-2] Sandbox API call failed. Last error: API Request Error: Max retries exceeded"
    )
    path.write_text("\n".join(line for i in range(1, 9) for line in (f"step:{i} - timing_s/step:9.0", said)))
    assert [event.kind for event in load(str(path)).events].count("sandbox_failure") == 8
