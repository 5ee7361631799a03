"""What the parts around a training write into its log: back ends of sandboxes, the object store, workers of AReaL and
prime-rl, a resume of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diagnose_runs import Array, noisy, run_of
from rollbook.diagnose.cost import is_asynchronous
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.readers.trouble import TroubleWatcher
from rollbook.diagnose.series import Event
from rollbook.diagnose.signs.environments import failing_lines
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N = 120
T = np.arange(N, dtype=np.float64)

USED_UP = (
    'docker.errors.APIError: 500 Server Error ("could not find an available, non-overlapping IPv4 address pool")',
    "Error response from daemon: all predefined address pools have been fully subnetted",
    "e2b.exceptions.RateLimitException: 429: you have reached the maximum number of concurrent E2B sandboxes (100)",
    "daytona_sdk.common.errors.DaytonaError: Failed to create sandbox: Total memory limit exceeded. Maximum allowed: 9",
    'kubernetes.client.exceptions.ApiException: (403) {"message": "pods env-7 is forbidden: exceeded quota: envs"}',
)
GONE = (
    "docker.errors.APIError: 500 Server Error for http+docker://localhost/v1.47/containers/create",
    "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    "e2b.exceptions.SandboxException: 502: Bad gateway",
    "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host sandbox-fusion:8080",
    "swerex.exceptions.DeploymentNotStartedError: deployment not started",
)


BARE = (
    "docker.errors.NotFound: 404 Client",
    "all predefined address pools have been fully subnetted",
    "OCI runtime create failed: runc create failed",
    "pods env-7 is forbidden: exceeded quota: envs, requested: pods=1",
    "modal.exception.ResourceExhausted",
)


@pytest.mark.parametrize("line", [*USED_UP, *GONE, *BARE])
def test_every_back_end_has_words_of_its_own_that_are_read(line: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"step:3 - a/b:1.0\n(AgentLoop pid=81) {line}\nstep:4 - a/b:1.0\n", encoding="utf-8")
    assert [(event.kind, event.step) for event in load(str(log)).events] == [("sandbox_failure", 3)]


@pytest.mark.parametrize(
    "line",
    [
        "Pulled docker image sandbox:1.2, 64 containers are running",
        "created 64 sandboxes in 3.1 s with e2b",
        "INFO DaytonaConfig(target='eu') ready",
        "kubernetes.client.exceptions.ApiException: (404) Reason: Not Found",
    ],
)
def test_words_of_back_ends_that_work_are_no_trouble(line: str) -> None:
    assert TroubleWatcher().watch(line, 3) is None


def _said(line: str, counts: Array) -> tuple[Event, ...]:
    return tuple(
        Event(kind="sandbox_failure", step=step, text=line)
        for step, count in enumerate(counts.astype(int))
        for _ in range(count)
    )


EVER_MORE = np.clip((T - 50) / 15, 0, 4) * (T % 2 + 0.5)
AT_ONCE = 2.0 * (T >= 60)


@pytest.mark.parametrize("line", USED_UP)
def test_ever_more_lines_of_a_limit_that_is_reached_are_a_leak(line: str) -> None:
    found = diagnose(run_of({}, events=_said(line, EVER_MORE))).findings
    assert [f.rule for f in found] == ["sandbox_leak"]
    assert 50 <= found[0].step <= 80


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        (GONE[0], EVER_MORE),  # no limit is spoken of, and nothing is lost
        (USED_UP[0], AT_ONCE),  # as many from one step on: somebody wants more of them
        (USED_UP[0], np.ones(N)),  # always
        (USED_UP[0], 2.0 * (T == 60)),
    ],
)
def test_other_complaints_at_an_unchanged_reward_are_no_leak(line: str, counts: Array) -> None:
    assert diagnose(run_of({}, events=_said(line, counts))).findings == ()


@pytest.mark.parametrize("line", GONE)
def test_a_back_end_that_is_gone_takes_the_reward_with_it(line: str) -> None:
    reward = np.where(T >= 60, 0.1, 0.45) + np.random.default_rng(1).normal(0, 0.02, N)
    found = diagnose(run_of({"critic/score/mean": reward}, events=_said(line, AT_ONCE))).findings
    assert [f.rule for f in found] == ["dead_sandbox_pool"]
    assert abs(found[0].step - 61) <= 4


def test_lines_that_lessen_do_not_grow() -> None:
    view = View.of(run_of({}, events=_said(USED_UP[0], EVER_MORE[::-1] * (T >= 20))))
    lines = failing_lines(view)
    assert lines is None or not lines.grows


def _spills(mib: Array, since: int = 40, every: int = 10) -> tuple[Event, ...]:
    steps = range(since, since + every * len(mib), every)
    return tuple(
        Event(
            kind="object_store_spill",
            step=s,
            text=f"Spilled {m:.0f} MiB, 31 objects, write throughput 611 MiB/s.",
        )
        for s, m in zip(steps, mib, strict=True)
    )


@pytest.mark.parametrize(
    ("mib", "verdict"),
    [
        (np.full(6, 2134.0), "well"),  # the first words of six nodes
        (2048.0 * 2 ** np.arange(3), "well"),  # 8 GiB in all, and no step slower
        (2048.0 * 2 ** np.arange(8), "object_store_spill"),  # 256 GiB: the disk fills
        (np.full(6, 300_000.0), "well"),  # said again at a level that stands
    ],
)
def test_what_was_spilled_counts_and_not_how_often_it_is_said(mib: Array, verdict: str) -> None:
    assert diagnose(run_of({}, events=_spills(mib))).verdict == verdict


def test_host_memory_that_grows_with_gigabytes_spilled_is_the_object_stores() -> None:
    grown = np.clip((T - 40) / 60, 0, 1)
    run = run_of(
        {
            "perf/cpu_memory_used_gb": noisy(220 * (1 + grown), 5, 0.01),
            "timing_s/gen": noisy(60 * (1 + 0.6 * grown), 6, 0.03),
            "num_turns/mean": noisy(4.0, 7, 0.02),
            "timing_s/adv": noisy(0.5 * (1 + 8 * grown), 8, 0.05),
        },
        events=_spills(6000.0 * 1.12 ** np.arange(40), every=2),
    )
    assert diagnose(run).verdict == "object_store_spill"


def test_a_trainer_that_waits_less_than_its_longest_sample_took_is_asynchronous() -> None:
    longest = {"timing_s/agent_loop/generate_sequences/max": noisy(30.0, 3, 0.1)}
    waits = noisy(4.0, 4, 0.3)
    assert is_asynchronous(View.of(run_of(longest | {"timing_s/gen": waits})))
    assert not is_asynchronous(View.of(run_of(longest | {"timing_s/gen": noisy(33.0, 4, 0.1)})))
    hangs = np.where(T >= 80, 1300.0 * np.clip((T - 79) / 10, 0.1, 1), waits)
    found = diagnose(run_of(longest | {"timing_s/gen": hangs, "timing_s/step": hangs + 40})).findings
    assert [f.rule for f in found] == ["buffer_never_fills"]


def test_a_trainer_of_prime_rl_that_waits_for_its_batch_hangs_in_no_collective(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    seconds = np.where(np.arange(60) >= 57, 2000.0, 90.0) * rng.normal(1, 0.02, 60)
    lines = [
        f"09:{i:02d}:00 SUCCESS Step {i} | Time: {s:.2f}s | Reward: 0.5{i % 10} | Max. Off-Policy Level: 2\n"
        f"09:{i:02d}:01 SUCCESS Step {i} | Time: {s + 3:.2f}s | Loss: 0.01 | Entropy: 0.4 | Grad. Norm: 0.3\n"
        for i, s in enumerate(seconds)
    ]
    log = tmp_path / "run.log"
    log.write_text("".join(lines), encoding="utf-8")
    run = load(str(log))
    assert "timing_s/update_actor" not in run.values
    np.testing.assert_allclose(run.values["timing_s/step"], seconds, atol=0.01)
    found = diagnose(run).findings
    assert [(f.rule, f.step) for f in found] == [("buffer_never_fills", 57)]
    log.write_text("".join(line.split("\n")[1] + "\n" for line in lines), encoding="utf-8")
    np.testing.assert_allclose(load(str(log)).values["timing_s/step"], seconds + 3, atol=0.01)


def test_the_memory_that_workers_of_areal_say_belongs_to_the_step_that_follows(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    head = "20260304-08:12:56 [FSDPEngine Rank 0] INFO: Memory-Usage"
    said = "".join(
        f"{head} recompute logp: memory allocated (GB): {20 + i}, memory reserved (GB): {30 + i}, device memory\n"
        f"{head} ppo update: memory allocated (GB): {36.5 + i}, memory reserved (GB): {41.25 + i}, device memory\n"
        f"Epoch 1/1 Step {i}/9 Train step {i}/9 done.\n│ a/avg │ 1.0 │\n"
        for i in range(1, 4)
    )
    log.write_text(said, encoding="utf-8")
    values = load(str(log)).values
    assert values["perf/max_memory_allocated_gb"].tolist() == [37.5, 38.5, 39.5]
    assert values["perf/max_memory_reserved_gb"].tolist() == [42.25, 43.25, 44.25]


def test_transformers_words_of_a_resume_are_one() -> None:
    event = TroubleWatcher().watch("  Continuing training from global step 57", 57)
    assert event is not None and event.kind == "resumed"


def test_a_leak_that_is_told_late_began_when_samples_began_to_wait() -> None:
    waits = noisy(12.0 * (1 + 3 * np.clip((T - 20) / 90, 0, 1)), 6, 0.03)
    found = diagnose(
        run_of({"perf/non_generation_time/mean": waits}, events=_said(USED_UP[0], EVER_MORE))
    ).findings
    assert [f.rule for f in found] == ["sandbox_leak"]
    assert 18 <= found[0].step <= 45
    assert "samples wait" in found[0].evidence[1].says
