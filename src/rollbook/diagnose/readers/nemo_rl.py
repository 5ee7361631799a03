"""NeMo-RL's console log: `===== Step 12/100 =====`, then lines "• Avg Reward: 0.43" and, of what was timed,
"• generation: 94.00s (61.2%)".

Facts: "Generation KL Error" is the distance of engine and trainer; with dynamic sampling the reward is printed of the
groups that were kept ("Avg Filtered Reward") and of all ("Avg Total Reward"). Steps are counted anew in every epoch, up
to the number after the slash. A validation prints lines of its own; they belong to the step before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import TROUBLE_BYTES, lines, number, plain
from rollbook.diagnose.series import Event, Row

NAMES = {
    "Loss": "actor/loss",
    "Grad Norm": "actor/grad_norm",
    "Generation KL Error": "rollout_corr/kl",
    "Avg Reward": "critic/rewards/mean",
    "Avg Filtered Reward": "critic/rewards/mean",
    "Mean Generation Length": "response_length/mean",
    "Avg Trajectory Age": "training/off_policy/trajectory_staleness/mean",
    "Accuracy": "val/all/reward",
    "Total step time": "timing_s/step",
    "generation": "timing_s/gen",
    "exposed_generation": "timing_s/gen",
    "reward_calculation": "timing_s/reward",
    "policy_and_reference_logprobs": "timing_s/old_log_prob",
    "policy_training": "timing_s/update_actor",
    "prepare_for_generation/total": "timing_s/update_weights",
    "prepare_for_generation/transfer_and_update_weights": "timing_s/update_weights",
    "weight_sync": "timing_s/update_weights",
    "advantage_calculation": "timing_s/adv",
    "checkpointing": "timing_s/save_checkpoint",
    "Total validation time": "timing_s/testing",
}

_STEP = re.compile(r"=====+ Step (\d+)/(\d+) =====+")
_ITEM = re.compile(
    r"^\s*(?:[•\-*] )\s*([A-Za-z][\w /()\-]*?): ([-+]?[\d.,]+(?:e[-+]?\d+)?|nan|inf)\s*(?:s\b|%|$|(?:tokens|steps)\b)",
    re.I,
)


def recognizes(head: str) -> float:
    has_results = re.search(r"• (?:Loss|Avg (?:Filtered )?Reward|Total step time): ", head)
    return 0.95 if has_results and _STEP.search(head) else 0.0


def read(path: Path) -> Iterator[Row | Event]:
    """Rows keyed by the step of the whole run. A step whose header is all there is has begun and not ended."""
    watcher = LineWatcher()
    step: int | None = None
    earlier = 0
    """Steps of the epochs before."""
    last = (0, 0)
    """The step in its epoch that was read last, and how many that has."""
    data: dict[str, float] = {}
    for raw in lines(path, (b"=== Step ", "• ".encode(), *TROUBLE_BYTES, *ENDING_BYTES), watcher):
        line = plain(raw)
        if (match := _STEP.search(line)) is not None:
            if step is not None and data:
                yield Row(step=step, data=data)
            at, of = int(match.group(1)), int(match.group(2))
            if at == 1 and last[0] > 1 and last[0] >= last[1]:
                earlier += last[1]
            last, step, data = (at, of), earlier + at, {}
            if event := watcher.ending.step(step):
                yield event
        elif "•" in line and step is not None and (item := _ITEM.search(line)) is not None:
            value = number(item.group(2).replace(",", ""))
            if value is not None:
                data.setdefault(item.group(1), value)
        else:
            if event := watcher.watch(line, step):
                yield event
    if step is not None and data:
        yield Row(step=step, data=data)
    yield from watcher.end(step)
