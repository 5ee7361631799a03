"""Logs of trainers of somebody's own: whatever lies in JSON, CSV or a console, under whatever names, is read, and what
was made of it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import HEAD_BYTES, load
from rollbook.diagnose.readers.words import meant
from rollbook.diagnose.series import RunSeries
from rollbook.diagnose.tree import diagnose
from rollbook.errors import DataError

REWARD = "critic/rewards/mean"
LENGTH = "response_length/mean"


def read(tmp_path: Path, text: str, name: str = "log.txt") -> RunSeries:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return load(str(tmp_path / name))


def judged(tmp_path: Path, text: str, name: str = "log.txt") -> Diagnosis:
    return diagnose(read(tmp_path, text, name))


ENTRIES: list[dict[str, Any]] = [
    {"round": i, "avg_return": i / 8, "policy_loss": 0.1, "note": "x"} for i in range(1, 7)
]
IN_JSON: dict[str, Any] = {
    "a list": ENTRIES,
    "a history": {"config": {"lr": 1e-6, "seed": 3}, "history": ENTRIES},
    "nested deeper": {"run": {"name": "x", "train": {"records": ENTRIES}}},
    "columns": {key: [entry[key] for entry in ENTRIES] for key in ("round", "avg_return", "policy_loss")},
    "columns of a key": {"metrics": {k: [e[k] for e in ENTRIES] for k in ("avg_return", "policy_loss")}},
    "pairs": {k: [[e["round"], e[k]] for e in ENTRIES] for k in ("avg_return", "policy_loss")},
    "points": {
        k: [{"step": e["round"], "value": e[k]} for e in ENTRIES] for k in ("avg_return", "policy_loss")
    },
    "steps as keys": {str(e["round"]): {k: e[k] for k in ("avg_return", "policy_loss")} for e in ENTRIES},
    "a dict in each": [{"round": e["round"], "metrics": {"avg_return": e["avg_return"]}} for e in ENTRIES],
}


@pytest.mark.parametrize("shape", IN_JSON)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_document_is_read_however_its_records_lie(shape: str, indent: int | None, tmp_path: Path) -> None:
    run = read(tmp_path, json.dumps(IN_JSON[shape], indent=indent), "log.json")
    assert run.steps.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(run.values[REWARD], np.arange(1, 7) / 8)
    assert run.renamed["avg_return"] == REWARD
    assert any("avg_return as the reward" in note for note in run.notes)


@pytest.mark.parametrize("split", [",", ";", "\t"])
def test_a_table_is_read_with_any_separator(split: str, tmp_path: Path) -> None:
    rows = [["iteration", "train_reward", "kl"], *([i, i / 8, 0.01] for i in range(3, 9))]
    run = read(tmp_path, "\n".join(split.join(map(str, row)) for row in rows), "log.csv")
    assert run.steps.tolist() == [3, 4, 5, 6, 7, 8]
    assert run.values[REWARD][0] == 0.375


@pytest.mark.parametrize(
    "line",
    [
        "step:{i} | mean_reward=0.{i} | policy_loss=0.01 | step_time_seconds=9.5",
        "Epoch:[1/2]({i}/900), Reward: 0.{i}, Actor Loss: 0.0100, Avg Response Len: 80.5",
        "RL Step {i} | Loss: 0.01 | Avg Reward: 0.{i} | Time: 8.6s | Ans: 73.0",
        "iter {i}: loss 0.01, reward 0.{i}",
        "2026-11-29 03:11:02 INFO trainer: {{'iteration': {i}, 'loss': 0.01, 'train_reward': np.float64(0.{i})}}",
        '[main] {{"update": {i}, "policy_loss": 0.01, "return/mean": 0.{i}}}',
        "\x1b[36m(Trainer pid=8)\x1b[0m [step {i}/40] loss=0.0100 rewards=0.{i}",
        "==== Step {i}/40 ====\n  Mean Reward: 0.{i}\n  Loss: 0.01\n",
        "==== Step {i}/40 ====\n| Mean Reward | 0.{i} |\n| Loss | 0.01 |\n",
        "--- [collected] - METRICS STEP {i} ---\n  rollout/avg_reward: 0.{i}\n  grpo_loss/mean: 0.01",
        "┃ Metric ┃ Value ┃\n│ step   │ {i}     │\n│ reward │ 0.{i}   │\n│ loss   │ 0.01  │\n└─────┴───┘",
        "| rollout/      |      |\n|   ep_rew_mean | 0.{i}  |\n| time/         |      |\n|   iteration   | {i}    |\n"
        "|   loss        | 0.01 |\n---",
        "GRPO:  1%|x  | {i}/100 [00:10<10:00, 10.2s/it, loss=0.01, reward=0.{i}]\r",
        "03:11:02.12 | INFO | __main__:train:88 - step {i}: reward 0.{i} ± 0.12, loss 0.01, len 210.3",
        "Iter {i:04d} | acc {i}0.0% | loss 0.01",
        "---\nstep: {i}\nmetrics:\n  reward: 0.{i}\n  loss: 0.01",
    ],
)
def test_a_console_is_read_however_it_prints(line: str, tmp_path: Path) -> None:
    text = "Loading model with max_response_length: 512\n" + "".join(
        line.format(i=i) + "\n" for i in (2, 3, 5)
    )
    run = read(tmp_path, text)
    assert (run.format, run.steps.tolist()) == ("console", [2, 3, 5])
    np.testing.assert_allclose(run.values[REWARD], [0.2, 0.3, 0.5])
    np.testing.assert_allclose(
        run.values["actor/loss" if "actor/loss" in run.values else "actor/pg_loss"], 0.01
    )


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("| Step | Avg Reward | kl |\n|------|--------|----|\n", "| {i} | 0.{i} | 0.01 |\n"),
        ("    step  mean_reward   kl\n", "{i}      {i}     0.{i}   0.01\n"),
    ],
    ids=["of an issue", "of a data frame"],
)
def test_a_table_within_a_text_is_read(header: str, row: str, tmp_path: Path) -> None:
    rows = "".join(row.format(i=i) for i in range(2, 7))
    run = read(tmp_path, f"What we saw of reward and loss:\n\n{header}{rows}\nThen it stopped.\n")
    assert run.steps.tolist() == [2, 3, 4, 5, 6]
    np.testing.assert_allclose(run.values[REWARD], [0.2, 0.3, 0.4, 0.5, 0.6])


def test_a_dict_over_several_lines_is_one_record_and_records_without_a_step_are_counted(
    tmp_path: Path,
) -> None:
    record = "{'reward': %s, 'reward_std': 0.0,\n 'completion_length': 80.0,\n 'kl': 0.1}\n"
    run = read(tmp_path, "Run 7 of the sweep.\n" + record % 0.5 + "def strategy():\n" + record % 0.25)
    assert run.steps.tolist() == [1, 2]
    assert run.values[REWARD].tolist() == [0.5, 0.25]
    assert any("records are counted" in note for note in run.notes)


def test_a_line_of_json_without_a_step_is_counted_and_said(tmp_path: Path) -> None:
    run = read(
        tmp_path, "".join(json.dumps({"loss": 0.1, "reward": i / 8}) + "\n" for i in range(4)), "x.jsonl"
    )
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert any("no column counts steps" in note for note in run.notes)


def test_rows_of_one_step_that_repeat_each_other_are_their_mean(tmp_path: Path) -> None:
    """A row a sample or a rank: neither a restart nor steps of their own."""
    rows = [{"step": i, "sample": j, "reward": float(j)} for i in range(5) for j in range(4)]
    run = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "x.jsonl")
    assert (run.num_steps, run.seams) == (5, [])
    assert run.values[REWARD].tolist() == [1.5] * 5
    assert any("4 rows" in note and "means" in note for note in run.notes)


def test_rows_of_an_evaluation_are_kept_apart_and_steps_joined(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for i in range(4):
        rows.append({"type": "eval", "grpo_step": i, "optimizer_step": 2 * i, "reward": 0.9})
        rows.append({"type": "rollout", "grpo_step": i, "mean_reward": 0.1 * i})
        rows.append({"type": "train", "grpo_step": i, "optimizer_step": 2 * i, "loss": 0.1})
    run = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "x.jsonl")
    assert run.steps.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(run.values[REWARD], [0.0, 0.1, 0.2, 0.3])
    np.testing.assert_allclose(run.values["val/all/reward"], 0.9)


def test_the_logs_own_name_stands_before_words_and_a_share_of_flat_groups_is_turned_round(
    tmp_path: Path,
) -> None:
    text = "step,mean_reward,reward,zero_std_ratio\n" + "".join(f"{i},9,0.{i},0.25\n" for i in range(1, 6))
    run = read(tmp_path, text, "x.csv")
    np.testing.assert_allclose(run.values[REWARD], [0.1, 0.2, 0.3, 0.4, 0.5])
    np.testing.assert_allclose(run.values["mean_reward"], 9)
    np.testing.assert_allclose(run.values["batch/effective_frac"], 0.75)
    assert run.in_log["batch/effective_frac"] == "1 - zero_std_ratio"


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("reward_mean", REWARD),
        ("train/mean_return", REWARD),
        ("success_rate", REWARD),
        ("avg_response_token_length", "response_length/mean"),
        ("rollout_seconds", "timing_s/gen"),
        ("cuda_max_memory_reserved_gib", "perf/max_memory_reserved_gb"),
        ("rollout_train_prob_diff_mean", "training/rollout_probs_diff_mean"),
        ("reward_std", None),
        ("total_tokens", None),
        ("mean_length_easy", None),
        ("max_grad_norm", None),
        ("entropy_coef", None),
        ("samples_per_second", None),
        ("steps_per_second", None),
        ("iters/sec", None),
        ("seconds_per_step", "timing_s/step"),
        ("charts/episodic_return", REWARD),
        ("losses/approx_kl", "actor/ppo_kl"),
        ("losses/value_loss", None),
    ],
)
def test_names_mean_what_their_words_say_and_nothing_more(name: str, metric: str | None) -> None:
    found = meant(name)
    assert (found[0] if found is not None else None) == metric


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "config.json",
            json.dumps({"learning_rate": 1e-6, "kl_coef": 0.1, "max_grad_norm": 1.0, "batch": 8}),
        ),
        ("samples.jsonl", '{"prompt": "2 + 2", "answer": "4", "score": 1.0}\n' * 9),
        ("package.json", json.dumps({"name": "x", "version": 3, "files": [1, 2, 3]})),
        ("people.csv", "name,age\nA,31\nB,40\n"),
        (
            "notes.txt",
            "The learning rate: 1e-6. We saw a reward of 0.5 at best.\nMore on Thursday: loss 0.3.\n",
        ),
    ],
)
def test_settings_samples_and_prose_are_no_runs(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read(tmp_path, text, name)


TRACE = 'Traceback (most recent call last):\n  File "/opt/x/train.py", line 31, in main\n    fit()\n'
ENDS: dict[str, tuple[str, str]] = {
    # what it is: (text, words of the deepest cause)
    "a traceback": (f"{TRACE}ValueError: 3 groups of 4 are no 16\n", "3 groups of 4"),
    "an error without words": (f"{TRACE}NotImplementedError\n", "NotImplementedError"),
    "no module": (f"$ python train.py\n{TRACE}ModuleNotFoundError: No module named 'flashy'\n", "flashy"),
    "a full disk": (f"{TRACE}OSError: [Errno 28] No space left on device\n", "No space left"),
    "a port in use": (f"{TRACE}OSError: [Errno 98] Address already in use\n", "already in use"),
    "in a fence": (f"It dies:\n```\n{TRACE}TypeError: int64 is not bfloat16\n```\n", "int64"),
    "of a rank": (
        "".join(f"[rank1]: {line}\n" for line in f"{TRACE}RuntimeError: shapes differ: 8 and 9".splitlines()),
        "shapes differ",
    ),
    "logged": (
        "".join(
            f"ERROR 07-10 16:53:50 [core.py:459] {line}\n" for line in f"{TRACE}KeyError: 'x/w'".splitlines()
        ),
        "KeyError",
    ),
    "caught": (
        "2026-11-29 03:11:02 - main - ERROR - Training failed with error:\nno CUDA device is free\n",
        "no CUDA",
    ),
    "launcher": (
        f"{TRACE}ValueError: lr is -1\n{TRACE}torch.distributed.elastic.ChildFailedError: train.py FAILED\n"
        f"{TRACE}subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.\n",
        "lr is -1",
    ),
    "raised from": (
        f"{TRACE}KeyError: 'reward_model'\n\nThe above exception was the direct cause of the following exception:\n\n"
        f"{TRACE}RuntimeError: the scorer failed\n",
        "reward_model",
    ),
    "Ray's": (
        f"{TRACE}ray.exceptions.RayTaskError(ValueError): ray::Runner.run() (pid=3, ip=10.0.0.3)\n"
        "ValueError: 10 batches were sampled, 10 at most\n",
        "10 at most",
    ),
    "behind a bar": (
        f"  0%|   | 1/900 [02:02<381:05:58, 122.42s/it]{TRACE}RuntimeError: copy failed\n",
        "copy failed",
    ),
    "after one that was ignored": (
        f"{TRACE}ValueError: no group\nException ignored in: <finalize object; dead>\n{TRACE}TimeoutError: late\n",
        "no group",
    ),
    "of another rank": (
        "".join(f"[rank2]: {line}\n" for line in f"{TRACE}ValueError: this rank has no batch".splitlines())
        + "".join(
            f"[rank0]: {line}\n" for line in f"{TRACE}DistError: Connection reset by peer".splitlines()
        ),
        "no batch",
    ),
    "of a process": (
        f"{TRACE}torch.spawn.ProcessRaisedException: \n\n-- Process 3 died:\n{TRACE}IndexError: 9\n",
        "IndexError",
    ),
    "of an engine": (
        f"{TRACE}ValueError: no memory for the cache\n{TRACE}RuntimeError: Engine core initialization failed. See root "
        "cause above.\n",
        "no memory for the cache",
    ),
    "of a group": (
        "  | ExceptionGroup: errors in a TaskGroup (1 sub-exception)\n  +-+---- 1 ----\n    | Traceback (most recent "
        'call last):\n    |   File "/x.py", line 3, in f\n    | ValueError: no environment is left\n    +-----\n',
        "no environment",
    ),
    "with a name of its own": (f"Exception in thread Thread-7 (loop):\n{TRACE}queue.Empty\n", "queue.Empty"),
    "of a parser": ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --foo 3\n", "--foo"),
    "of the shell": ("run.sh: line 3: torchrun: command not found\n", "command not found"),
    "of a launcher": (
        "[2026-11-29 03:11:02,114] [ERROR] [launch.py:322:handler] ['python', 'x.py'] exits with return code = -9\n",
        "was killed from outside",
    ),
    "on several lines": ("RuntimeError: Rank 3, iteration 1:\nUnexpected value in bucket 0\n", "bucket 0"),
    "told to go": ("*** SIGTERM received at time=1700000000 on cpu 14 ***\n", "SIGTERM"),
    "by the scheduler": (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-29T03:00:00 ***\n",
        "CANCELLED",
    ),
    "a worker of Ray's": (
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. There are some "
        "potential root causes. (1) The process is killed by SIGKILL by OOM killer.\n",
        "worker died or was killed",
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_text_without_metrics_is_read_and_its_deepest_cause_told(what: str, tmp_path: Path) -> None:
    text, words = ENDS[what]
    diagnosis = judged(tmp_path, text)
    assert (diagnosis.verdict, diagnosis.findings[0].step) == ("run_stopped", int("1/900" in text))
    assert words in diagnosis.findings[0].title
    if what == "a worker of Ray's":
        assert "a worker process has gone" in diagnosis.findings[0].title


@pytest.mark.parametrize(
    "line", ["{{'loss': 0.1, 'grad_norm': 0.2, 'reward': 0.{i}}}", "iter {i} | reward=0.{i} | loss=0.1"]
)
def test_an_error_after_the_last_step_is_told_with_it(line: str, tmp_path: Path) -> None:
    text = "".join(line.format(i=i) + "\n" for i in range(1, 6)) + f"{TRACE}ValueError: no more prompts\n"
    finding = judged(tmp_path, text).findings[0]
    assert (finding.rule, finding.step) == ("run_stopped", 5)


def test_an_error_after_the_summary_of_the_training_is_told(tmp_path: Path) -> None:
    """The script of a trainer that had done its steps dies with what it had to write; a shutdown's noise is none."""
    steps = "".join(f"{{'loss': 0.1, 'grad_norm': 0.2, 'reward': 0.{i}}}\n" for i in range(1, 6))
    text = f"{steps}{{'train_runtime': 3.0, 'train_loss': 0.1}}\n"
    assert (
        "int8 has no JSON"
        in judged(tmp_path, f"{text}{TRACE}TypeError: int8 has no JSON\n").findings[0].title
    )
    assert judged(tmp_path, f"{text}{TRACE}BrokenPipeError: [Errno 32] Broken pipe\n").is_well
    verl = (
        "".join(f"step:{i} - critic/score/mean:0.{i}\n" for i in range(1, 6))
        + "Final validation metrics: {}\n"
    )
    diagnosis = judged(tmp_path, f"{verl}{TRACE}TypeError: int8 has no JSON\n")
    assert diagnosis.is_well
    assert any("after the training had ended: TypeError" in note for note in diagnosis.notes)


def test_what_a_program_logged_and_got_over_ends_nothing(tmp_path: Path) -> None:
    """A tool of an episode fails after the last step of a log that goes on."""
    steps = "".join(f"iter {i} | reward=0.{i} | loss=0.1\n" for i in range(1, 6))
    logged = "".join(
        f"ERROR 07-10 16:53:50 [tool.py:4] {line}\n" for line in f"{TRACE}KeyError: 'x'".splitlines()
    )
    assert judged(tmp_path, steps + logged).is_well
    assert judged(tmp_path, f"{steps}{TRACE}KeyboardInterrupt\n").is_well


@pytest.mark.parametrize("text", ["KeyboardInterrupt\n", "ValueError:\n", "^CKeyboardInterrupt\n"])
def test_the_name_of_an_error_alone_is_a_text_that_holds_one(tmp_path: Path, text: str) -> None:
    diagnosis = judged(tmp_path, text)
    assert diagnosis.verdict == "run_stopped"
    assert text.strip().removeprefix("^C") in diagnosis.findings[0].title


def test_a_hand_over_every_third_step_is_no_stall(tmp_path: Path) -> None:
    seconds = [66 + i % 4 if i % 3 == 0 else 10 + 0.1 * (i % 5) for i in range(40)]
    line = "step:{} | mean_reward=0.{} | step_time_seconds={}\n"
    text = "".join(line.format(i, 20 + i % 7, s) for i, s in enumerate(seconds))
    assert judged(tmp_path, text).findings == ()
    seconds = [66 if i in (3, 9, 11, 20, 26, 31, 38) else 10 for i in range(40)]
    late = "".join(line.format(i, 20 + i % 7, s) for i, s in enumerate(seconds))
    assert judged(tmp_path, late).verdict == "collective_hang"


def test_few_records_say_what_they_show_and_alarm_nobody(tmp_path: Path) -> None:
    names = ("loss", "grad_norm", "reward", "frac_reward_zero_std", "completions/clipped_ratio")
    line = "{{" + ", ".join(f"'{name}': {{}}" for name in names) + "}}\n"
    flat = line.format(0.0, 0.0, 0.0, 1.0, 1.0)
    diagnosis = judged(tmp_path, flat * 2)
    assert diagnosis.verdict == "not_judged"
    (note,) = [note for note in diagnosis.notes if "too few to judge" in note]
    for says in ("reward is 0", "two different rewards", "grad_norm is 0", "all of the answers"):
        assert says in note
    good = line.format(0.1, 0.2, 0.5, 0.25, 0.1)
    assert not [note for note in judged(tmp_path, good * 2).notes if "too few" in note]


@pytest.mark.parametrize("shape", ["list", "console"])
def test_supervised_training_is_told_for_what_it_is(shape: str, tmp_path: Path) -> None:
    entries = [
        {"loss": 2.0 / i, "grad_norm": 3.0, "learning_rate": 1e-5, "mean_token_accuracy": 0.6, "step": i}
        for i in range(1, 9)
    ]
    text = json.dumps(entries) if shape == "list" else "".join(f"{entry}\n" for entry in entries)
    diagnosis = judged(tmp_path, text)
    assert diagnosis.verdict == "not_judged"
    assert any("no log of reinforcement learning" in note for note in diagnosis.notes)
    assert not any(
        "reinforcement" in note for note in judged(tmp_path, text.replace("grad_norm", "reward")).notes
    )


def test_null_is_nan_only_of_what_is_measured(tmp_path: Path) -> None:
    """A logger writes null of what it does not measure; of a loss, or after a number, it is one that is none."""
    rows = [
        {"step": i, "reward": 0.1 if i < 3 else None, "eval_loss": None, "loss": None} for i in range(1, 5)
    ]
    run = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "x.jsonl")
    assert run.non_finite == {REWARD: [3, 4], "actor/loss": [1, 2, 3, 4]}


def test_verls_own_words_of_a_filter_that_finds_too_few_are_told(tmp_path: Path) -> None:
    text = f"{TRACE}ValueError: num_gen_batches=10 >= max_num_gen_batches=10. Generated too many.\n"
    assert judged(tmp_path, text).verdict == "filter_starvation"


def test_a_line_of_a_policys_loss_alone_is_reinforcement_learning(tmp_path: Path) -> None:
    diagnosis = judged(tmp_path, "step 1: {'train/loss': 0.1, 'train/pg_loss': 0.0, 'train/ppo_kl': 0.1}\n")
    assert not any("reinforcement" in note for note in diagnosis.notes)


def test_a_frameworks_steps_behind_megabytes_of_sampled_texts_are_its_own(tmp_path: Path) -> None:
    """Samples that are printed before the first step hold names with numbers, too."""
    sample = "Trial 3: reward = 0.5, loss = 0.1, accuracy = 0.2 of what the answer says about step 7.\n"
    steps = "".join(f"step:{i} - critic/score/mean:0.{i} - timing_s/gen:41.2\n" for i in range(1, 9))
    run = read(tmp_path, sample * (1 + HEAD_BYTES // len(sample)) + steps)
    assert (run.format, run.num_steps) == ("verl-console", 8)


def test_progress_bars_alone_tell_seconds_and_where_it_ended(tmp_path: Path) -> None:
    bars = "\r".join(f"  1%|x   | {i}/900 [0{i}:40<5:56:20, 60.0s/it]" for i in range(3, 9))
    others = (
        "Loading shards: 100%|##| 8/8 [00:10<00:00,  1.2s/it]",
        "Rollout generation:  9%|x | 5/64 [01:00<02:00]",
    )
    text = f"{others[0]}\n{bars}\n{others[1]}\n"
    run = read(tmp_path, text)
    assert (run.format, run.steps.tolist()) == ("console", [4, 5, 6, 7, 8])
    assert run.values["timing_s/step"].tolist() == [60.0] * 5
    assert any("progress bars alone (8 of 900 steps)" in note for note in run.notes)
    finding = judged(tmp_path, f"{text}{TRACE}ValueError: no more prompts\n").findings[0]
    assert (finding.rule, finding.step) == ("run_stopped", 8)


def test_a_document_of_a_folder_is_read_and_dumps_of_samples_are_no_logs_beside_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps(ENTRIES))
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "prompt": "2 + 2", "reward": 1.0}\n' * 9)
    assert load(str(tmp_path)).source.endswith("metrics.json")
    assert load(str(tmp_path / "samples.jsonl")).values[REWARD].tolist() == [1.0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.log"])
def test_damaged_logs_of_anybody_are_read_as_far_as_they_go(name: str, seed: int, tmp_path: Path) -> None:
    """Bytes flipped, pieces left out and repeated: what is whole is read."""
    rng = np.random.default_rng(seed)
    rows = [{"iter": i, "mean_reward": i / 50, "loss": 0.1} for i in range(1, 41)]
    whole = {
        "x.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "x.json": json.dumps(rows),
        "x.csv": "iter,mean_reward,loss\n" + "".join(f"{r['iter']},{r['mean_reward']},0.1\n" for r in rows),
        "x.log": "".join(f"iter {r['iter']} | mean_reward={r['mean_reward']} | loss=0.1\n" for r in rows),
    }[name].encode()
    for _ in range(12):
        damaged = bytearray(whole)
        start, length = int(rng.integers(len(whole) // 2, len(whole))), int(rng.integers(1, 60))
        match rng.integers(3):
            case 0:
                del damaged[start : start + length]
            case 1:
                damaged[start : start + length] = rng.bytes(length)
            case _:
                damaged[start:start] = damaged[start - length : start]
        (tmp_path / name).write_bytes(damaged)
        run = load(str(tmp_path / name))
        assert run.num_steps >= 2  # a digit that is lost makes a step of long ago, and a restart of it
        diagnose(run)


def test_a_list_that_is_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    run = read(tmp_path, json.dumps(ENTRIES)[:-30], "x.json")
    assert run.steps.tolist() == [1, 2, 3, 4, 5]
    assert any("cut short" in note for note in run.notes)


@pytest.mark.parametrize("decimals", [3, 4, 5])
def test_a_learning_rate_that_was_printed_as_zero_is_not_zero(decimals: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    text = "".join(
        f"step {i} | reward={0.4 + 0.1 * rng.random():.{decimals}f} | grad_norm={rng.random():.{decimals}f} | "
        f"kl={rng.random():.{decimals}f} | lr={2e-6:.{decimals}f}\n"
        for i in range(1, 60)
    )
    assert judged(tmp_path, text).findings == ()


def test_a_long_traceback_after_the_last_step_is_told(tmp_path: Path) -> None:
    frames = "".join(
        f'  File "/opt/x/part.py", line {i}, in call\n    return inner(batch)\n' for i in range(60)
    )
    steps = "".join(f"iter {i} | reward=0.{i} | loss=0.1\n" for i in range(1, 6))
    text = f"{steps}Traceback (most recent call last):\n{frames}ValueError: no more prompts\n"
    finding = judged(tmp_path, text).findings[0]
    assert (finding.rule, finding.step) == ("run_stopped", 5)


@pytest.mark.parametrize("name", ["len", "mean_len", "avg_length"])
def test_a_length_beside_a_reward_is_that_of_the_answers(name: str, tmp_path: Path) -> None:
    """By itself it may be anything's; beside a name that says more it stands back."""
    text = "".join(f"step {i} | reward {i / 9:.3f} | {name} {100 + i}.5 | loss 0.1\n" for i in range(9))
    assert list(read(tmp_path, text).values[LENGTH]) == [100.5 + i for i in range(9)]
    both = "".join(
        f"step={i} reward={i / 9:.3f} {name}={i} response_length={7 + i} loss=0\n" for i in range(9)
    )
    assert list(read(tmp_path, both).values[LENGTH]) == [7.0 + i for i in range(9)]
    alone = "".join(f"step={i} loss={i / 9:.3f} {name}={i}\n" for i in range(9))
    assert LENGTH not in read(tmp_path, alone).values


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_a_part_of_the_reward_that_is_full_is_no_reward_at_its_top(prefix: str, tmp_path: Path) -> None:
    """An export holds the reward and, of its functions, that of the format alone."""
    rows = [
        {
            "step": i,
            f"{prefix}reward": 0.2 + 0.006 * i,
            f"{prefix}rewards/format/mean": min(1.0, 0.5 + i / 40),
        }
        for i in range(1, 61)
    ]
    full = [row | {f"{prefix}reward": row[f"{prefix}rewards/format/mean"]} for row in rows]
    for these, states in ((rows, []), (full, ["reward_saturates"])):
        text = "".join(json.dumps(row) + "\n" for row in these)
        assert [state.name for state in judged(tmp_path, text, "log.jsonl").states] == states


def _entries(log: Path, *last: dict[str, object], of_verl: bool = False) -> Diagnosis:
    numbers = [{"mean_reward": 0.3 + step % 5 / 50, "loss": 0.1, "grad_norm": 0.2} for step in range(40)]
    rows = ({"step": i, "data": row} if of_verl else {"step": i, **row} for i, row in enumerate(numbers))
    log.write_text("\n".join(map(json.dumps, (*rows, *last))) + "\n")
    return diagnose(load(str(log)))


@pytest.mark.parametrize("of_verl", [False, True])
@pytest.mark.parametrize(
    "entry",
    [
        {"step": 40, "error": "ValueError: batch is empty"},
        {"event": "crash", "traceback": f"{TRACE}ValueError: batch is empty"},
        {"level": "ERROR", "message": "ValueError: batch is empty", "time": 1.7e9},
    ],
)
def test_an_error_in_a_field_of_the_last_entry_ended_the_run(
    tmp_path: Path, entry: dict[str, object], of_verl: bool
) -> None:
    diagnosis = _entries(tmp_path / "log.jsonl", entry, of_verl=of_verl)
    assert diagnosis.verdict == "run_stopped"
    assert "batch is empty" in diagnosis.findings[0].title


def test_an_error_in_a_field_that_more_steps_follow_or_that_is_a_samples_ends_nothing(tmp_path: Path) -> None:
    error = {"step": 40, "error": "ValueError: batch is empty"}
    after = {"step": 41, "mean_reward": 0.3, "loss": 0.1}
    assert _entries(tmp_path / "log.jsonl", error, after).findings == ()
    assert _entries(tmp_path / "log.jsonl", {"step": 40, "message": "ValueError: none"}).findings == ()
    rows = [
        {"step": i // 4, "reward": i * i % 7 % 2, "loss": 0.1, "error": "TypeError: x"} for i in range(80)
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert diagnose(load(str(tmp_path / "samples.jsonl"))).findings == ()


def test_memory_that_ran_out_in_a_field_of_an_error_is_told_as_such(tmp_path: Path) -> None:
    words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert _entries(tmp_path / "log.jsonl", {"exception": words}).verdict == "late_oom_with_length"


def test_one_step_far_from_its_own_policy_is_a_note(tmp_path: Path) -> None:
    line = "model.py:660 - step 1: {'train/loss': 0.1, 'train/pg_loss': 0.0, 'train/ppo_kl': -0.2}\n"
    assert any("train/ppo_kl is -0.2 nats" in note for note in judged(tmp_path, line).notes)
    ppo = "{'objective/scores': -1.35, 'policy/approxkl_avg': 26.2, 'loss/policy_avg': 0.3, 'val/ratio': 0.00093}\n"
    assert any("0.00093 and not near 1" in note for note in judged(tmp_path, ppo).notes)
    near = ppo.replace("26.2", "0.01").replace("0.00093", "0.98")
    assert not any("too few to judge, but" in note for note in judged(tmp_path, near).notes)
