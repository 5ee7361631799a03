"""Every answer is right from the start: prompts that teach nothing, or a scorer that says yes to everything. A run that
learned first and then stands near the top is a state (`algorithm/rewards.py`), and no fault."""

from __future__ import annotations

from rollbook.diagnose.finding import Finding
from rollbook.diagnose.rules.parts import flat_rewards
from rollbook.diagnose.view import View

RULE = "all_right"


def judge(view: View) -> Finding | None:
    return flat_rewards.finding(view, "all_right")
