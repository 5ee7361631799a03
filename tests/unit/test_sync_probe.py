"""The probe: a baseline per engine and dtype, and what it says when the engine computes something else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rollbook.sync.probe import Probe, ProbeReport
from rollbook.types import Floats, Ids, VersionRun


@dataclass
class Answer:
    response_ids: Ids
    logprobs: Floats
    version_runs: tuple[VersionRun, ...]


async def probed(
    probe: Probe, gap: float, *, version: int = 5, labeled: tuple[int, ...] = (5,), dtype: str = "bfloat16"
) -> ProbeReport:
    trainer = np.log(np.array([0.5, 0.25, 0.125], np.float32))

    async def sample(prompt_ids: Ids) -> Answer:
        assert prompt_ids.tolist() == [1, 2, 3]
        logprobs = trainer + np.array([0, -gap, gap / 3], np.float32)
        return Answer(np.array([7, 8, 9], np.int32), logprobs, tuple(VersionRun(v, 1) for v in labeled))

    async def score(prompt_ids: Ids, response_ids: Ids) -> Floats:
        assert response_ids.tolist() == [7, 8, 9]
        return trainer

    return await probe.check(
        replica_id=2, weight_version=version, engine="native", dtype=dtype, sample=sample, score=score
    )


def new_probe() -> Probe:
    return Probe(np.array([1, 2, 3], np.int32))


async def test_gap_is_the_largest_difference() -> None:
    report = await probed(new_probe(), 0.03)
    assert report.gap_max_nats == pytest.approx(0.03, rel=1e-4)
    assert report.gap_mean_nats == pytest.approx((0.03 + 0.01) / 3, rel=1e-4)
    assert report.is_passed


async def test_limit_is_four_times_the_worst_of_the_first_three() -> None:
    probe = new_probe()
    for gap in (0.02, 0.04, 0.03):
        assert (await probed(probe, gap)).is_passed
    assert (await probed(probe, 0.15)).is_passed
    report = await probed(probe, 0.17)
    assert not report.is_passed
    assert report.limit_nats == pytest.approx(0.16, rel=1e-4)
    assert (
        "replica 2: its logprobs are 0.17 nats from the trainer's at version 5; the limit is 0.16"
        in report.why
    )


async def test_an_exact_engine_is_held_to_the_floor_of_its_dtype() -> None:
    probe = new_probe()
    for _ in range(3):
        await probed(probe, 0.0, dtype="float32")
    assert (await probed(probe, 9e-5, dtype="float32")).is_passed
    assert not (await probed(probe, 2e-4, dtype="float32")).is_passed
    assert (await probed(probe, 0.5, dtype="bfloat16")).is_passed  # another dtype has its own baseline


async def test_a_gross_gap_never_becomes_the_baseline() -> None:
    probe = new_probe()
    for _ in range(5):
        assert not (await probed(probe, 3.0)).is_passed
    assert (await probed(probe, 0.01)).baseline_nats == 0.0


async def test_a_large_baseline_does_not_lift_the_limit_above_the_ceiling() -> None:
    """Three first gaps of 0.4 in bfloat16, where no sound engine shows more than 1: the limit is 1, not 1.6."""
    probe = new_probe()
    for _ in range(3):
        assert (await probed(probe, 0.4)).is_passed
    assert (await probed(probe, 0.9)).limit_nats == 1.0
    assert not (await probed(probe, 1.2)).is_passed


async def test_nan_fails() -> None:
    report = await probed(new_probe(), float("nan"))
    assert not report.is_passed
    assert report.gap_max_nats == float("inf")


@pytest.mark.parametrize("labeled", [(4,), (4, 5), ()])
async def test_tokens_of_another_version_fail_however_close(labeled: tuple[int, ...]) -> None:
    report = await probed(new_probe(), 0.0, labeled=labeled)
    assert not report.is_passed
    assert f"sampled under versions {list(labeled)} after version 5 was committed" in report.why
