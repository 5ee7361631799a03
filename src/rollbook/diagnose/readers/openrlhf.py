"""OpenRLHF's console log: `Global step 12: {'policy_loss': 0.01, 'reward': 0.4, ...}`, and what its earlier versions
leave of a step: the last state of a progress bar, `Episode [1/2]: ... 3/30 [..., policy_loss=0.01, reward=0.4]` or
`Train epoch [1/1]: ... 8/8 [..., pg=0.01, rm=0.4, glen=812]`.

Facts: `kl` is the distance to the reference, `ppo_kl` that of a step, `vllm_kl` that of engine and trainer;
`timing/make_experience` is the forwards, `timing/broadcast` the publication; `dynamic_filtering_pass_rate` is the
share of groups in percent that the filter leaves. A bar is drawn anew with every batch; its last state is the step's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import (
    NUMBER,
    TROUBLE_BYTES,
    dict_pairs,
    lines,
    number,
    open_binary,
    plain,
)
from rollbook.diagnose.series import Event, Row

NAMES = {
    "policy_loss": "actor/pg_loss",
    "pg": "actor/pg_loss",
    "policy_entropy": "actor/entropy",
    "entropy_loss": "actor/entropy",
    "actor_grad_norm": "actor/grad_norm",
    "actor_lr": "actor/lr",
    "act_lr": "actor/lr",
    "ppo_clip_ratio": "actor/pg_clipfrac",
    "ppo_kl": "actor/ppo_kl",
    "kl": "actor/kl_loss",
    "vllm_kl": "rollout_corr/kl",
    "critic_loss": "critic/vf_loss",
    "cri": "critic/vf_loss",
    "critic_grad_norm": "critic/grad_norm",
    "reward": "critic/rewards/mean",
    "rm": "critic/rewards/mean",
    "score": "critic/score/mean",
    "response_length": "response_length/mean",
    "glen": "response_length/mean",
    "truncated": "response_length/clip_ratio",
    "num_samples": "batch/num_sequences",
    "pass_rate": "filter/kept_frac",
    "timing/generation": "timing_s/gen",
    "timing/make_experience": "timing_s/old_log_prob",
    "timing/ppo_train": "timing_s/update_actor",
    "timing/broadcast": "timing_s/update_weights",
    "timing/step_total": "timing_s/step",
}

_STEP = re.compile(r"\bGlobal step (\d+): (\{.*)")
_EPISODE = re.compile(r"\bEpisode \[(\d+)/\d+\]:.*?\| *(\d+)/(\d+) \[([^\]]*)")
_TRAIN = re.compile(r"\bTrain epoch \[(\d+)/(\d+)\]:.*?\| *(\d+)/(\d+) \[([^\]]*)")
_POSTFIX = re.compile(rf", ?([A-Za-z]\w*)=({NUMBER})(?=, |$)")
_FILTER = "dynamic_filtering_pass_rate"


def recognizes(head: str) -> float:
    if "Global step " in head and re.search(
        r"\bGlobal step \d+: \{'(?:policy_loss|critic_loss|actor_lr|kl|reward|response_length)'", head
    ):
        return 0.97
    if "Episode [" not in head and "Train epoch [" not in head:
        return 0.0
    bars = re.findall(
        r"\b(?:Episode|Train epoch) \[\d+/\d+\]:[^\n]*\[[^\]\n]*\b(?:policy_loss|pg)=[^\]\n]*", head
    )
    return 0.9 if any("glen=" in bar or "response_length=" in bar for bar in bars) else 0.0


def read(path: Path) -> Iterator[Row | Event]:
    """Rows keyed by global step; of bars, one for each that came to its end."""
    with open_binary(path) as file:
        has_records = b"Global step " in file.read(4 * 1024 * 1024)
    watcher, bars = LineWatcher(), _Bars()
    wanted = (b"Global step ",) if has_records else (b"Episode [", b"Train epoch [")
    step: int | None = None
    for raw in lines(path, (*wanted, *TROUBLE_BYTES, *ENDING_BYTES), watcher):
        line = plain(raw)
        row = _record(line) if has_records else bars.see(line)
        if row is not None:
            step = row.step
            if event := watcher.ending.step(step):
                yield event
            yield row
        elif not any(word.decode() in line for word in wanted) and (event := watcher.watch(line, step)):
            yield event
    if not has_records and (row := bars.last()) is not None:
        yield row
        step = row.step
    yield from watcher.end(step)


def _record(line: str) -> Row | None:
    match = _STEP.search(line)
    if match is None:
        return None
    data = _as_shares(dict_pairs(match.group(2)))
    return Row(step=int(match.group(1)), data=data) if data else None


def _as_shares(data: dict[str, float]) -> dict[str, float]:
    if (percent := data.pop(_FILTER, None)) is not None:
        data["pass_rate"] = percent / 100.0
    return data


class _Bars:
    """Makes a row of the last state of each progress bar; those of whole episodes say more than those of one epoch."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._at: tuple[int, ...] = ()
        self._data: dict[str, float] = {}
        self._of_episodes = False

    def see(self, line: str) -> Row | None:
        """The row that ends with this line, if one does."""
        if (match := _EPISODE.search(line)) is not None:
            at, text = (int(match.group(1)), int(match.group(2))), match.group(4)
            is_new = at != self._at
        elif (match := _TRAIN.search(line)) is not None and not self._of_episodes:
            at, text = (int(match.group(1)), int(match.group(3))), match.group(5)
            is_new = at < self._at  # it counts from the first batch of the first epoch again
        else:
            return None
        data = _as_shares(
            {name: v for name, value in _POSTFIX.findall(text) if (v := number(value)) is not None}
        )
        if not data:
            return None
        if (
            match.re is _EPISODE and not self._of_episodes
        ):  # the bars of epochs before it were of the same step
            self._of_episodes, self._num_steps, self._data = True, 0, {}
        done = self.last() if is_new else None
        self._at, self._data = at, data
        return done

    def last(self) -> Row | None:
        """The row of the bar that was seen last."""
        if not self._data:
            return None
        self._num_steps += 1
        return Row(step=self._num_steps, data=self._data)
