"""Every answer is wrong from the start: the scorer, the format it expects, or prompts that are far too hard. Rewards
that fell to the bottom later on are another rule's (`dead_scorer`, `one_source_all_zero`)."""

from __future__ import annotations

from rollbook.diagnose.finding import Finding
from rollbook.diagnose.rules.parts import flat_rewards
from rollbook.diagnose.view import View

RULE = "all_wrong"


def judge(view: View) -> Finding | None:
    return flat_rewards.finding(view, "all_wrong")
