"""Two kinds of log that are easily taken for something else: of preference training, whose rewards are no scores, and
JSON that was copied while it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

STEPS = range(1, 61)


def judged(tmp_path: Path, text: str, name: str) -> Diagnosis:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return diagnose(load(str(tmp_path / name)))


def _pairs(chosen: str, rejected: str, margins: str) -> list[dict[str, float]]:
    """A DPO run that goes well: what was chosen gets likelier than the reference has it, what was rejected less."""
    return [
        {"step": i, "loss": 0.69 - 0.006 * i, "grad_norm": 2.0 + i % 3, "learning_rate": 5e-7}
        | {chosen: 0.01 * i, rejected: -0.02 * i, margins: 0.03 * i}
        for i in STEPS
    ]


NAMES = {
    "TRL's": ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    "its trackers'": ("train/rewards/chosen", "train/rewards/rejected", "train/rewards/margins"),
    "OpenRLHF's": ("chosen_reward", "reject_reward", "reward_margin"),
    "NeMo-RL's": ("rewards_chosen_mean", "rewards_rejected_mean", "rewards_margin_mean"),
}


@pytest.mark.parametrize("whose", NAMES)
@pytest.mark.parametrize("shape", ["state", "printed", "lines"])
def test_rewards_of_pairs_are_no_scores_of_a_source(whose: str, shape: str, tmp_path: Path) -> None:
    """Every reward of a rejected answer is below zero, and nothing is wrong with that."""
    entries = _pairs(*NAMES[whose])
    if shape == "state":
        diagnosis = judged(tmp_path, json.dumps({"log_history": entries}), "trainer_state.json")
    elif shape == "printed":
        diagnosis = judged(tmp_path, "".join(f"{entry}\n" for entry in entries), "log.txt")
    else:
        diagnosis = judged(tmp_path, "".join(json.dumps(entry) + "\n" for entry in entries), "log.jsonl")
    assert diagnosis.findings == ()
    assert diagnosis.verdict == "not_judged"
    assert any("preference training" in note for note in diagnosis.notes)


@pytest.mark.parametrize(("prefix", "name"), [("", "trainer_state.json"), ("train/", "wandb.jsonl")])
def test_pairs_beside_a_sampled_reward_are_reinforcement_learning(
    prefix: str, name: str, tmp_path: Path
) -> None:
    """Online DPO samples its pairs and scores them."""
    entries = [
        {prefix * (key != "step") + key: value for key, value in entry.items()}
        | {f"{prefix}objective/scores": 0.2 + 0.005 * entry["step"]}
        for entry in _pairs(*NAMES["TRL's"])
    ]
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    text = lines if prefix else json.dumps({"log_history": entries})
    diagnosis = judged(tmp_path, text, name)
    assert diagnosis.findings == ()
    assert not any("preference" in note for note in diagnosis.notes)
    assert next(s for s in diagnosis.signals if s.name == "reward by source").verdict == "well"


ENTRIES: list[dict[str, Any]] = [
    {"step": i, "_step": i, "loss": 0.1, "reward": 0.2 + 0.005 * i, "grad_norm": 0.5} for i in STEPS
]
CUT = {
    "trainer_state.json": json.dumps({"epoch": 1.0, "log_history": ENTRIES, "max_steps": 90}, indent=1),
    "history.json": json.dumps([{"_step": e["_step"], "train/reward": e["reward"]} for e in ENTRIES]),
}


@pytest.mark.parametrize("name", CUT)
def test_json_that_is_cut_is_judged_up_to_the_cut(name: str, tmp_path: Path) -> None:
    text = CUT[name]
    diagnosis = judged(tmp_path, text[: text.index("40,")], name)
    assert (diagnosis.first_step, diagnosis.last_step) == (1, 39)
    assert any("cut short" in note for note in diagnosis.notes)
    whole = judged(tmp_path, text, name)
    assert whole.last_step == 60
    assert not any("cut short" in note for note in whole.notes)


def test_what_follows_a_list_is_none_of_its_records(tmp_path: Path) -> None:
    """The file ends within the settings that stand behind the history."""
    text = json.dumps({"log_history": ENTRIES, "callbacks": {"step": 999, "loss": 7.0}, "x": 1})
    diagnosis = judged(tmp_path, text[:-4], "trainer_state.json")
    assert diagnosis.last_step == 60


def test_the_training_of_a_reward_model_is_not_judged_as_one_of_a_policy(tmp_path: Path) -> None:
    """Its mean reward is one of given answers, and half of its pairs in the right order are no success."""
    rows = [
        {
            "step": i,
            "loss": 0.69,
            "grad_norm": 2.0,
            "mean_reward": 0.0,
            "min_reward": -2.0,
            "max_reward": 2.0,
            "accuracy": 0.5,
            "margin": 0.1,
        }
        for i in range(40)
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    run = load(str(tmp_path / "trainer_state.json"))
    assert not run.matching("critic/rewards/")
    diagnosis = diagnose(run)
    assert (diagnosis.findings, diagnosis.states) == ((), ())
    assert any("of a reward model's" in note for note in diagnosis.notes)
