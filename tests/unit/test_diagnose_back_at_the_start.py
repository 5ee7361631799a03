"""A run that is taken up again with the weights that it began with, and one that goes on."""

from __future__ import annotations

import numpy as np
import pytest

from rollbook.diagnose.readers.assemble import assemble
from rollbook.diagnose.series import Row
from rollbook.diagnose.tree import diagnose

RNG = np.random.default_rng(8)
AT = 14
"""The step that is run a second time first, of a log that had come five steps further."""


def _row(step: int, learned: int) -> Row:
    """A step, whose policy has learned for so many steps; a console's three decimals."""
    data = {
        "critic/score/mean": -0.48 + 0.008 * learned + RNG.normal(0, 0.02),
        "actor/entropy": 0.53 - 0.003 * learned + RNG.normal(0, 0.004),
        "actor/kl_loss": 0.001 + 0.0001 * learned,
        "actor/grad_norm": RNG.normal(0.19, 0.01),
        "training/rollout_probs_diff_mean": 0.009 + RNG.normal(0, 0.0003),
        "response_length/mean": RNG.normal(3880, 40),
        "timing_s/gen": RNG.normal(90, 1),
        "timing_s/update_actor": RNG.normal(60, 1),
        "timing_s/update_weights": RNG.normal(4, 0.1),
        "timing_s/step": RNG.normal(170, 1),
    }
    return Row(step=step, data={name: round(value, 3) for name, value in data.items()})


@pytest.mark.parametrize(("kept", "verdict"), [(0, "discontinuity_after_resume"), (13, "well")])
def test_steps_that_are_run_again_tell_whether_the_weights_are_the_first_ones(
    kept: int, verdict: str
) -> None:
    first = [_row(i, i - 1) for i in range(1, AT + 5)]
    again = [_row(AT + i, kept + i) for i in range(20)]
    found = diagnose(assemble([*first, *again], source="log", format="verl-console"))
    assert found.verdict == verdict
    assert not found.findings or found.findings[0].step == AT


def test_a_run_that_had_learned_nothing_stands_where_it_stood() -> None:
    first = [_row(i, 0) for i in range(1, AT + 5)]
    again = [_row(AT + i, 0) for i in range(20)]
    assert diagnose(assemble([*first, *again], source="log", format="verl-console")).verdict == "well"
