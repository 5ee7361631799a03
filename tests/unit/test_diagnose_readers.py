"""Every log format becomes the same series, in the catalogue's names, whatever stands around its lines."""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from rollbook.diagnose.readers.table import READERS, detect, load
from rollbook.diagnose.readers.text import is_ended_by_newline
from rollbook.diagnose.tree import diagnose
from rollbook.errors import DataError
from rollbook.observe.clock import ManualClock
from rollbook.observe.recorder import Recorder
from rollbook.observe.values import Ratio


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_verl_file_logger_reads_null_nan_and_infinity_as_not_finite(tmp_path: Path) -> None:
    log = _write(
        tmp_path / "exp.jsonl",
        '{"step": 1, "data": {"actor/grad_norm": 0.5, "critic/rewards/mean": 0.25}}\n'
        '{"step": 2, "data": {"actor/grad_norm": null, "critic/rewards/mean": NaN}}\n'
        '{"step": 3, "data": {"actor/grad_norm": Infinity, "critic/rewards/mean": 0.75}}\n',
    )
    run = load(str(log))
    assert run.format == "verl-file"
    assert run.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(run.values["critic/rewards/mean"], [0.25, math.nan, 0.75])
    assert run.non_finite == {"actor/grad_norm": [2, 3], "critic/rewards/mean": [2]}


@pytest.mark.parametrize(
    "text",
    [
        '\ufeff{"step": 1, "data": {"critic/rewards/mean": 0.1}}\n{"step": 2, "data": {"critic/rewards/mean": 0.2}}\n',
        '{"step": 1.0, "data": {"critic/rewards/mean": 0.1}}\n{"step": 2.0, "data": {"critic/rewards/mean": 0.2}}\r\n',
        '{"data": {"critic/rewards/mean": "0.1"}, "step": 1}\n{"data": {"critic/rewards/mean": "0.2"}, "step": 2}\n',
    ],
    ids=["byte order mark", "steps as floats", "data first"],
)
def test_verl_file_lines_that_went_through_other_tools_are_read(text: str, tmp_path: Path) -> None:
    run = load(str(_write(tmp_path / "exp.jsonl", text)))
    assert (run.format, run.steps.tolist(), run.notes) == ("verl-file", [1, 2], [])
    np.testing.assert_array_equal(run.values["critic/rewards/mean"], [0.1, 0.2])


def test_a_last_line_cut_short_is_left_out_and_said(tmp_path: Path) -> None:
    whole = '{"step": 1, "data": {"critic/rewards/mean": 0.1}}\n{"step": 2, "data": {"critic/rewards/mean": 0.2}}\n'
    run = load(str(_write(tmp_path / "exp.jsonl", whole + '{"step": 3, "data": {"critic/rew')))
    assert run.steps.tolist() == [1, 2]
    assert any("cut short" in note for note in run.notes)


def test_verl_console_reads_prefixes_colors_numpy_values_and_interleaved_lines(tmp_path: Path) -> None:
    """Two records on one line, one wrapped by a terminal, and other processes' words between and within."""
    log = _write(
        tmp_path / "run.log",
        "2026-11-01 09:12:01,123\tINFO worker.py:1879 -- Started a local Ray instance.\n"
        "\x1b[36m(TaskRunnerV1 pid=81)\x1b[0m step:1 - actor/entropy:np.float64(0.5) - critic/rewards/mean:0.25"
        " - training/global_step:1.000 - val-core/openai/gsm8k/acc/mean@1:0.508\n"
        "(WorkerDict pid=9) micro batch 3/12 step: done\n"
        "(TaskRunnerV1 pid=81) step:2 - actor/entropy:0.4(raylet) Spilled 4096 MiB, 12 objects, 9 MiB/s\n"
        " - critic/rewards/mean:-1e-3 - timing_s/gen:41\n"
        "(TaskRunnerV1 pid=81) step:3 - actor/entropy:nan - critic/rewards/mean:0.5 step:4 - actor/entropy:0.2\n",
    )
    run = load(str(log))
    assert run.format == "verl-console"
    assert run.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(run.values["actor/entropy"], [0.5, 0.4, math.nan, 0.2])
    np.testing.assert_array_equal(run.values["critic/rewards/mean"], [0.25, -0.001, 0.5, math.nan])
    assert run.values["timing_s/gen"][1] == 41.0
    assert run.values["val-core/openai/gsm8k/acc/mean@1"][0] == 0.508
    assert [e.kind for e in run.events] == ["object_store_spill"]


def test_older_verl_names_are_read_in_todays(tmp_path: Path) -> None:
    log = _write(
        tmp_path / "run.log",
        "step:1 - actor/entropy_loss:0.3 - mismatch/mismatch_kl:0.001 - actor/perf/max_memory_allocated_gb:44.1\n"
        "step:2 - actor/entropy_loss:0.3 - mismatch/mismatch_kl:0.002 - actor/perf/max_memory_allocated_gb:44.1\n",
    )
    run = load(str(log))
    assert set(run.values) == {"actor/entropy", "rollout_corr/kl", "perf/max_memory_allocated_gb"}
    assert run.renamed["mismatch/mismatch_kl"] == "rollout_corr/kl"


def test_trl_state_history_and_print_say_the_same(tmp_path: Path) -> None:
    """A printed entry has no step: it counts; some versions print values as strings."""
    entries = [
        {
            "loss": 0.01,
            "reward": 0.25,
            "completions/mean_length": 120.0,
            "frac_reward_zero_std": 0.25,
            "epoch": 0.1,
        },
        {
            "loss": 0.02,
            "reward": 0.5,
            "completions/mean_length": 130.0,
            "frac_reward_zero_std": 0.5,
            "epoch": 0.2,
        },
    ]
    history = [{**entry, "step": i + 1} for i, entry in enumerate(entries)]
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"log_history": [*history, {"train_runtime": 3.0, "step": 2}]}))
    lines = _write(tmp_path / "history.jsonl", "".join(json.dumps(entry) + "\n" for entry in history))
    printed = _write(
        tmp_path / "train.log",
        "  0%|          | 1/20 [00:19<1:06:22]\r" + "".join(f"{_as_strings(entry)}\n" for entry in entries),
    )
    for where in (tmp_path / "checkpoint-2", lines, printed):
        run = load(str(where))
        assert run.format == "trl"
        assert run.steps.tolist() == [1, 2]
        np.testing.assert_allclose(run.values["critic/rewards/mean"], [0.25, 0.5])
        np.testing.assert_allclose(run.values["response_length/mean"], [120.0, 130.0])
        np.testing.assert_allclose(run.values["batch/effective_frac"], [0.75, 0.5])


def _as_strings(entry: dict[str, float]) -> str:
    return "{" + ", ".join(f"'{key}': '{value}'" for key, value in entry.items()) + "}"


def test_slime_records_of_a_rollout_and_its_optimizer_steps_become_one_step(tmp_path: Path) -> None:
    log = _write(
        tmp_path / "slime.log",
        "(RolloutManager pid=18) [2026-04-15 07:57:53] rollout.py:1193 - perf 0: {'rollout/response_len/mean': 2773.7,"
        " 'rollout/truncated_ratio': 0.46, 'perf/rollout_time': 371.2, 'rollout/dynamic_filter/drop_zero_std_0.0': 3,"
        " 'rollout/dynamic_filter/drop_zero_std_1.0': 5}\n"
        "(MegatronTrainRayActor pid=64) data.py:180 - rollout 0: {'rollout/raw_reward': 0.40625, 'rollout/step': 0}\n"
        "(MegatronTrainRayActor pid=64) model.py:400 - step 0: {'train/grad_norm': 0.2, 'train/step': 0,"
        " 'train/train_rollout_logprob_abs_diff': 0.0129}\n"
        "(MegatronTrainRayActor pid=64) model.py:400 - step 1: {'train/grad_norm': 0.3, 'train/step': 1}\n"
        "(RolloutManager pid=18) rollout.py:1193 - perf 1: {'rollout/response_len/mean': 2800.0}\n"
        "(MegatronTrainRayActor pid=64) model.py:400 - step 2: {'train/grad_norm': 0.4, 'train/step': 2}\n",
    )
    run = load(str(log))
    assert run.format == "slime"
    assert run.steps.tolist() == [0, 1]
    np.testing.assert_array_equal(run.values["actor/grad_norm"], [0.3, 0.4])
    np.testing.assert_array_equal(run.values["response_length/mean"], [2773.7, 2800.0])
    assert run.values["critic/rewards/mean"][0] == 0.40625
    assert run.values["training/logprob_gap/mean"][0] == 0.0129
    assert run.values["training/filter_groups/evicted_samples"][0] == 8.0


def test_areal_tables_become_steps(tmp_path: Path) -> None:
    log = _write(
        tmp_path / "areal.log",
        "\x1b[0m20260815-10:11:12.123 StatsLogger INFO: Epoch 1/10 Step 1/100 Train step 1/1000 done.\n"
        "20260815-10:11:12.124 StatsLogger INFO: Stats (1/1):\n"
        "╭──────────────────────────┬────────────┬──────────────────────────┬────────────╮\n"
        "│ ppo_actor/task_reward/avg │ 4.0625e-01 │ timeperf/rollout │ 3.1200e+01 │\n"
        "│ ppo_actor/update/entropy/avg │ 1.2e-01 │ ppo_actor/update/grad_norm │ 2.0e-01 │\n"
        "╰──────────────────────────┴────────────┴──────────────────────────┴────────────╯\n"
        "20260815-10:12:12.123 StatsLogger INFO: Epoch 1/10 Step 2/100 Train step 2/1000 done.\n"
        "│ ppo_actor/task_reward/avg │ 4.5e-01 │ ppo_actor/update/grad_norm │ nan │\n",
    )
    run = load(str(log))
    assert run.format == "areal"
    np.testing.assert_array_equal(run.values["critic/rewards/mean"], [0.40625, 0.45])
    assert run.values["timing_s/gen"][0] == 31.2
    assert run.values["actor/entropy"][0] == 0.12
    assert run.non_finite == {"actor/grad_norm": [2]}


def test_what_trackers_call_trl_and_areal_metrics_is_read_in_our_names(tmp_path: Path) -> None:
    """TRL's trackers put "train/" before the names of its history; AReaL logs staleness under "version_stats"."""
    history = _write(
        tmp_path / "trl.jsonl",
        '{"_step": 1, "train/reward": 0.25, "train/frac_reward_zero_std": 0.25, "train/rewards/exact/mean": 0.5,'
        ' "train/sample/staleness_mean": 1.5, "train/perf/weight_sync_s": 2.0, "train/tools/failure_frequency": 0.1}\n'
        '{"_step": 2, "train/reward": 0.5}\n',
    )
    first = {name: values[0] for name, values in load(str(history)).values.items()}
    stale = "training/off_policy/trajectory_staleness/mean"
    assert first == {
        "critic/rewards/mean": 0.25,
        "batch/effective_frac": 0.75,
        "reward/exact/mean": 0.5,
        stale: 1.5,
        "timing_s/update_weights": 2.0,
        "rollout/sandbox_error_ratio": 0.1,
    }
    table = _write(
        tmp_path / "areal.log",
        "Epoch 1/10 Step 1/100 Train step 1/1000 done.\n"
        "│ ppo_actor/update/version_stats/sample_staleness_proximal_avg │ 1.5 │\n"
        "Epoch 1/10 Step 2/100 Train step 2/1000 done.\n│ ppo_actor/task_reward/avg │ 0.5 │\n",
    )
    assert load(str(table)).values[stale][0] == 1.5


def test_wandb_chart_csv_and_history_are_read(tmp_path: Path) -> None:
    chart = _write(
        tmp_path / "chart.csv",
        '"Step","my-run - critic/rewards/mean","my-run - critic/rewards/mean__MIN",'
        '"my-run - critic/rewards/mean__MAX"\n'
        '"1","0.25","0.25","0.25"\n"2","","",""\n"3","0.5","0.5","0.5"\n',
    )
    run = load(str(chart))
    assert run.format == "wandb"
    assert run.steps.tolist() == [1, 3]
    np.testing.assert_array_equal(run.values["critic/rewards/mean"], [0.25, 0.5])
    history = _write(
        tmp_path / "history.jsonl",
        '{"_step": 10, "_timestamp": 1000.0, "training/global_step": 1, "train/grad_norm": 0.1}\n'
        '{"_step": 11, "_timestamp": 1060.0, "training/global_step": 2, "train/grad_norm": "NaN"}\n',
    )
    run = load(str(history))
    assert run.steps.tolist() == [1, 2]
    assert run.at_s.tolist() == [1000.0, 1060.0]
    assert run.non_finite == {"actor/grad_norm": [2]}


def _event_record(step: int, values: dict[str, float], *, as_tensor: bool) -> bytes:
    """One TFRecord with an Event, written by hand from the format's description."""

    def field(number: int, wire: int, payload: bytes) -> bytes:
        size = bytes([len(payload)]) if wire == 2 else b""
        return bytes([number << 3 | wire]) + size + payload

    summary = b""
    for tag, value in values.items():
        scalar = (
            field(8, 2, field(1, 0, b"\x01") + field(5, 2, struct.pack("<f", value)))
            if as_tensor
            else field(2, 5, struct.pack("<f", value))
        )
        summary += field(1, 2, field(1, 2, tag.encode()) + scalar)
    event = field(1, 1, struct.pack("<d", 1000.0 + step)) + field(2, 0, bytes([step])) + field(5, 2, summary)
    return struct.pack("<QI", len(event), 0) + event + struct.pack("<I", 0)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_tensorboard_scalars_are_read_without_tensorboard(tmp_path: Path, as_tensor: bool) -> None:
    folder = tmp_path / "tensorboard_log" / "project" / "experiment"
    folder.mkdir(parents=True)
    records = b"".join(
        _event_record(step, {"actor/entropy": 0.5 / step, "timing_s/gen": 10.0}, as_tensor=as_tensor)
        for step in (1, 2, 4)
    )
    (folder / "events.out.tfevents.1700000000.host.1.0").write_bytes(records + records[:20])
    run = load(str(tmp_path / "tensorboard_log"))
    assert run.format == "tensorboard"
    assert run.steps.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(run.values["actor/entropy"], [0.5, 0.25, 0.125])
    assert run.at_s.tolist() == [1001.0, 1002.0, 1004.0]
    assert any("cut short" in note for note in run.notes)


def test_our_run_directory_gives_series_times_and_errors_in_words(tmp_path: Path) -> None:
    clock = ManualClock()
    path = tmp_path / "run"
    recorder = Recorder(path, clock=clock)
    for step in range(3):
        with recorder.step(step):
            recorder.metrics({"critic/rewards/mean": Ratio(step, 4)})
            clock.advance(10.0)
    with pytest.raises(RuntimeError), recorder.step(3), recorder.span("sync"):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    clock.advance(100.0)
    recorder.close()
    run = load(str(path))
    assert run.format == "rollbook"
    np.testing.assert_array_equal(run.values["critic/rewards/mean"], [0.0, 0.25, 0.5])
    assert np.diff(run.at_s).tolist() == [10.0, 10.0]
    oom = [event for event in run.events if event.kind == "out_of_memory"]
    assert [(event.step, event.fields["stage"]) for event in oom] == [(3, "sync")]
    assert load(str(path / "metrics.jsonl")).format == "rollbook"


def test_a_compressed_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.log.gz"
    with gzip.open(path, "wt") as file:
        file.write("".join(f"step:{i} - critic/rewards/mean:0.{i}\n" for i in range(1, 9)))
    assert load(str(path)).values["critic/rewards/mean"].tolist() == [i / 10 for i in range(1, 9)]


def test_a_compressed_log_that_was_cut_is_read_up_to_the_cut(tmp_path: Path) -> None:
    """A copy of a .gz that ended early, in the middle of a record; members written one after the other are one log."""
    noise = random.Random(0)
    steps = [f"step:{i} - a/b:{noise.random()} - c/d:{noise.random()}\n" for i in range(2000)]
    whole = gzip.compress("".join(steps[:1000]).encode()) + gzip.compress("".join(steps[1000:]).encode())
    path = tmp_path / "run.log.gz"
    path.write_bytes(whole)
    assert load(str(path)).num_steps == 2000
    path.write_bytes(whole[: len(whole) * 3 // 4])
    run = load(str(path))
    assert 1400 < run.num_steps < 1600
    assert run.values["a/b"][1200] == float(steps[1200].split("a/b:")[1].split()[0])
    assert not is_ended_by_newline(path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-8"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_log_that_another_shell_wrote_wide_is_read(tmp_path: Path, encoding: str, is_packed: bool) -> None:
    """What PowerShell's > writes; with more characters than a block holds, one of them of four bytes."""
    text = "".join(
        f"step:{i} - critic/rewards/mean:0.{i} - actor/lr:1e-6 😀{'.' * 300_000}\r\n" for i in range(1, 9)
    )
    raw = ("\ufeff" + text).encode(encoding)
    path = tmp_path / "run.log"
    path.write_bytes(gzip.compress(raw) if is_packed else raw)
    run = load(str(path))
    assert run.format == "verl-console"
    assert run.values["critic/rewards/mean"].tolist() == [i / 10 for i in range(1, 9)]
    assert not [note for note in run.notes if "cut short" in note]


def test_a_wide_log_cut_within_its_last_line_is_read_up_to_it(tmp_path: Path) -> None:
    lines = [json.dumps({"step": i, "data": {"critic/rewards/mean": i / 10}}) for i in range(1, 9)]
    (tmp_path / "exp.jsonl").write_bytes(("\ufeff" + "\n".join(lines)).encode("utf-16-le")[:-21])
    run = load(str(tmp_path / "exp.jsonl"))
    assert (run.format, run.steps.tolist()) == ("verl-file", [*range(1, 8)])
    assert any("cut short" in note for note in run.notes)


def test_the_newest_known_log_of_a_folder_is_taken(tmp_path: Path) -> None:
    _write(tmp_path / "notes.txt", "nothing to see\n")
    _write(tmp_path / "out.log", "step:1 - critic/rewards/mean:0.1\n")
    assert load(str(tmp_path)).source.endswith("out.log")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("empty.log", "", "is empty"),
        ("other.log", "hello\nworld\n", "no step of a known log format"),
        ("none.jsonl", '{"step": "x", "data": {}}\n{"step": 1.5, "data": {"a": 1}}\n', "no step"),
    ],
)
def test_what_is_no_log_is_an_error_with_a_remedy(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(DataError, match=says) as raised:
        load(str(_write(tmp_path / name, text)))
    assert raised.value.remedy


def test_an_unknown_format_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        load(str(_write(tmp_path / "a.log", "x")), format="verl")
    assert "verl" in raised.value.remedy


def test_each_format_with_a_beginning_is_recognized_by_its_own_reader(tmp_path: Path) -> None:
    beginnings = {
        "verl-file": '{"step": 1, "data": {"a/b": 1}}',
        "verl-console": "(TaskRunner pid=1) step:1 - a/b:1 - c/d:2",
        "trl": "{'loss': 0.1, 'grad_norm': 0.2, 'reward': 0.3, 'epoch': 0.1}",
        "slime": "perf 0: {'perf/rollout_time': 1.0}",
        "prime-rl": "09:01:17 SUCCESS Step 0 | Time: 850.78s | Reward: 0.5400 | Async Level: 0",
        "areal": "Epoch 1/2 Step 1/3 Train step 1/6 done.",
        "openrlhf": "Global step 1: {'policy_loss': 0.01, 'reward': 0.4}",
        "nemo-rl": "====== Step 1/9 ======\n  • Loss: 0.1\n  • Generation KL Error: 0.001\n  • Avg Reward: 0.4",
        "wandb": "Step,critic/rewards/mean",
        "records": "round,mean_return\n1,0.5\n2,0.25",
        "console": "iter 1 | mean_return=0.5 | loss=0.1",
    }
    for name, text in beginnings.items():
        assert detect(_write(tmp_path / f"{name}.log", text + "\n")) == name
    assert set(beginnings) | {"rollbook", "tensorboard"} == set(READERS)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_logs_are_read_as_far_as_they_go(tmp_path: Path, seed: int) -> None:
    """Bytes flipped, lines cut and repeated, binary in between: what is whole is read, nothing raises but DataError."""
    rng = np.random.default_rng(seed)
    rows = [{"step": i, "data": {"critic/rewards/mean": i / 50, "timing_s/gen": 10.0}} for i in range(1, 51)]
    as_json = "".join(json.dumps(row) + "\n" for row in rows)
    as_console = "".join(
        f"step:{i} - critic/rewards/mean:{i / 50} - timing_s/gen:10.0\n" for i in range(1, 51)
    )
    for text, format in ((as_json, "verl-file"), (as_console, "verl-console")):
        data = bytearray(text.encode())
        for at in rng.integers(0, len(data), 30):
            data[at] = rng.integers(0, 256)
        cut = int(rng.integers(0, len(data)))
        path = tmp_path / f"{format}.log"
        path.write_bytes(
            bytes(data[:cut]) + b"\x00\xff\xfe" * 50 + bytes(data[cut:]) + bytes(data[: len(data) // 3])
        )
        run = load(str(path), format=format)
        assert run.num_steps >= 15
        finite = run.values["critic/rewards/mean"][np.isfinite(run.values["critic/rewards/mean"])]
        assert np.median(finite) <= 1.0


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary file behind the log: lines are cut to the limit (here 4 KiB) and read on."""
    from rollbook.diagnose.readers import text

    monkeypatch.setattr(text, "MAX_LINE_BYTES", 4096)
    path = tmp_path / "run.log"
    path.write_bytes(
        b"step:1 - critic/rewards/mean:0.5\n" + b"x" * 1_000_000 + b"\nstep:2 - critic/rewards/mean:0.6\n"
    )
    assert load(str(path)).values["critic/rewards/mean"].tolist() == [0.5, 0.6]
    assert max(len(line) for line in text.lines(path)) <= 4096


def test_no_sentence_of_trouble_is_skipped_before_it_is_read(tmp_path: Path) -> None:
    """The quick look at bytes lets every sentence through that the patterns know."""
    sentences = {
        "out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB",
        "host_out_of_memory": "Workers killed due to the node running low on memory (OOM)",
        "collective_timeout": "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
        "object_store_spill": "(raylet) Spilled 4096 MiB, 12 objects, write throughput 612 MiB/s",
        "resumed": "Setting global step to 120",
        "sandbox_failure": "sandbox exec-17 timed out after 30 s",
        "engine_died": "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue",
        "engine_back": "Restarted rollout engine 3",
    }
    text = "".join(
        f"{sentence}\nstep:{i} - a/b:{i}\n" for i, sentence in enumerate(sentences.values(), start=1)
    )
    run = load(str(_write(tmp_path / "run.log", text)))
    assert [event.kind for event in run.events] == list(sentences)


@pytest.mark.parametrize(
    "frame",
    [
        '"fsdp_vllm.py", line 204, in update_weights',
        '"verl/sharding_manager/fsdp_vllm.py", line 2, in __enter__',
    ],
)
def test_the_stage_of_an_out_of_memory_is_that_of_its_traceback(tmp_path: Path, frame: str) -> None:
    text = f"step:1 - a/b:1\nFile {frame}\ntorch.OutOfMemoryError: CUDA out of memory.\nstep:2 - a/b:1\n"
    (event,) = load(str(_write(tmp_path / "run.log", text))).events
    assert (event.step, event.fields) == (1, {"stage": "sync"})


def test_an_engine_that_finds_no_memory_when_it_wakes_is_an_out_of_memory_in_the_sync(tmp_path: Path) -> None:
    """vLLM's allocator writes a capital E and no traceback of the trainer."""
    text = (
        "step:1 - a/b:1\n"
        "(vLLMHttpServer pid=7) CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n"
        "(vLLMHttpServer pid=7) RuntimeError: CUDA Error: out of memory\n"
    )
    out_of_memory, *_, stopped = load(str(_write(tmp_path / "run.log", text))).events
    assert (out_of_memory.kind, out_of_memory.fields) == ("out_of_memory", {"stage": "sync"})
    assert (stopped.kind, stopped.fields) == ("run_failed", {"cause": "device_memory"})


def test_seconds_of_a_sync_in_a_record_do_not_put_an_error_into_the_sync(tmp_path: Path) -> None:
    text = (
        "step:1 - timing_s/update_weights:2.0 - checkpoint_engine/payload_mbytes:1\n"
        'File "torch_functional.py", line 155, in entropy_from_logits\n'
        "torch.OutOfMemoryError: CUDA out of memory.\n"
        "step:2 - a/b:1\n"
    )
    (event,) = load(str(_write(tmp_path / "run.log", text))).events
    assert (event.kind, event.fields) == ("out_of_memory", {})


def test_a_chart_of_several_runs_keeps_them_apart(tmp_path: Path) -> None:
    """W&B writes every run of a chart into one CSV, with columns of its own; the shorter one ends in empty cells."""
    name = "critic/score/mean"
    header = [
        "Step",
        *(f"{run} - {name}{more}" for run in ("base - v2", "tuned") for more in ("", "__MIN", "__MAX")),
    ]
    rows = [
        [i, 0.1 + i / 100, 0, 1, *([0.6 - i / 100, 0, 1] if i < 8 else ["", "", ""])] for i in range(1, 13)
    ]
    path = tmp_path / "chart.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([header, *rows])
    tuned, base = load(str(path)), load(str(path), run_idx=0)
    assert (tuned.num_runs, tuned.run_idx, tuned.num_steps, base.num_steps) == (2, 1, 7, 12)
    assert tuned.values[name].tolist() == [0.6 - i / 100 for i in range(1, 8)]
    assert base.values[name].tolist() == [0.1 + i / 100 for i in range(1, 13)]
    assert any(note.endswith("this is run 1 of 0 to 1, tuned") for note in tuned.notes)


def test_two_formats_in_one_file_are_said(tmp_path: Path) -> None:
    """A shell that appended one job's console to another's."""
    verl = "".join(f"step:{i} - critic/score/mean:0.5 - timing_s/step:9.0\n" for i in range(1, 6))
    slime = "".join(f"rollout {i}: {{'rollout/raw_reward': 0.4}}\n" for i in range(5))
    (tmp_path / "both.log").write_text(slime + verl)
    run = load(str(tmp_path / "both.log"))
    other = "slime" if run.format == "verl-console" else "verl-console"
    assert [note for note in run.notes if f"--format {other} reads those" in note]
    (tmp_path / "one.log").write_text(verl)
    assert load(str(tmp_path / "one.log")).notes == []


def test_a_note_calls_a_metric_as_the_log_does(tmp_path: Path) -> None:
    log = "".join(f"{{'loss': 0.1, 'reward': 0.{i}, 'kl': nan, 'epoch': 0.{i}}}\n" for i in range(1, 5))
    notes = diagnose(load(str(_write(tmp_path / "trl.log", log)))).notes
    assert "NaN, null or infinite, and left out: kl in 4 steps, the first 1" in notes


def test_prime_rl_tells_the_size_of_the_device_beside_its_peak(tmp_path: Path) -> None:
    """Memory is all the trainer's line has of it, and what is reserved: it follows the lengths up to the brim."""
    lines = []
    for step in range(1, 121):
        up = max(step - 60, 0) / 60
        length, held, reward = 1000 + 2500 * up, 55 + 23 * up, 0.5 + step % 7 / 100
        orchestrator = f"Time: 60.0s | Reward: {reward} | Seq. Length: {length:.1f} tokens/sample"
        trainer = f"Time: 50.0s | Loss: 0.01 | Peak Mem.: {held:.1f}/79.1 GiB (70.0%)"
        lines += [f"10:00:00 SUCCESS Step {step} | {line}\n" for line in (orchestrator, trainer)]
    (tmp_path / "run.log").write_text("".join(lines))
    run = load(str(tmp_path / "run.log"))
    assert run.values["perf/device_memory_gb"].tolist() == [79.1] * 120
    finding = diagnose(run).findings[0]
    assert (finding.rule, abs(finding.step - 60) <= 5) == ("late_oom_with_length", True)
    assert "of 79.1 GiB" in finding.evidence[0].says


def test_skyrls_names_are_read_and_its_mean_of_ratios_is_no_gap(tmp_path: Path) -> None:
    names = (
        "trainer/global_step",
        "reward/avg_raw_reward",
        "generate/avg_num_tokens",
        "async/staleness_mean",
    )
    names += (
        "policy/rollout_train_prob_diff_mean",
        "policy/rollout_train_logprobs_abs_diff_mean",
        "timing/policy_train",
    )
    rows = [(i, 0.1 * i, 900, 1.5, 1.02, 0.012, 44.0) for i in range(1, 7)]
    (tmp_path / "export.csv").write_text(
        "\n".join(",".join(map(str, row)) for row in (("_step", *names), *((r[0], *r) for r in rows)))
    )
    run = load(str(tmp_path / "export.csv"))
    assert run.values["training/off_policy/trajectory_staleness/mean"].tolist() == [1.5] * 6
    assert run.values["training/logprob_gap/mean"].tolist() == [0.012] * 6
    assert run.values["timing_s/update_actor"].tolist() == [44.0] * 6
    assert "training/rollout_probs_diff_mean" not in run.values


def test_memory_that_ran_out_while_an_engine_woke_up_is_read_in_the_words_of_its_saver(
    tmp_path: Path,
) -> None:
    steps = "".join(
        f"rollout {i}: {{'rollout/raw_reward': 0.{i}, 'rollout/response_len/mean': 900.0}}\n"
        for i in range(1, 9)
    )
    died = (
        '  File "/srv/sglang/scheduler.py", line 2711, in resume_memory_occupation\n'
        "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=57\n"
        "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.\n"
    )
    (tmp_path / "run.log").write_text(f"{steps}Traceback (most recent call last):\n{died}")
    assert diagnose(load(str(tmp_path / "run.log"))).verdict == "oom_in_sync"


def test_a_run_of_ours_that_somebody_stopped_is_well_and_its_repeated_steps_keep_their_times(
    tmp_path: Path,
) -> None:
    """Steps 2 and 3 are run again after a stop; then a second stop cuts step 4."""
    lives = ((0, (0, 1, 2, 3)), (100, (2, 3)))
    events, rows = [], []
    for begin, steps in lives:
        events.append({"kind": "run_resumed" if begin else "run_started", "at_s": begin})
        for i, step in enumerate(steps):
            span = {
                "kind": "span",
                "name": "step",
                "span_id": i,
                "step": step,
                "at_s": begin + 10 * i,
                "duration_s": 10,
            }
            events.append(span)
            rows.append({"step": step, "data": {"critic/rewards/mean": 0.1 * step + 0.001 * begin}})
        events.append(
            {"kind": "interrupted", "step": steps[-1] + 1, "at_s": begin + 50, "effect": "stopping at once"}
        )
        events.append(
            {"kind": "step_failed", "step": steps[-1] + 1, "at_s": begin + 50, "error": "CancelledError"}
        )
    for name, items in (("events.jsonl", events), ("metrics.jsonl", rows)):
        (tmp_path / name).write_text("".join(json.dumps(item) + "\n" for item in items))
    run = load(str(tmp_path))
    assert run.at_s.tolist() == [10, 20, 110, 120]
    assert not any("clock" in note for note in run.notes)
    diagnosis = diagnose(run)
    assert "run_stopped" not in [f.rule for f in diagnosis.findings]
    assert any("somebody stopped the run" in note and "stopping at once" in note for note in diagnosis.notes)


@pytest.mark.parametrize(
    "name", ["sample_staleness_theta_avg", "sample_staleness_theta/avg", "sample_staleness_proximal/avg"]
)
def test_areals_ages_are_read_however_its_tracker_joins_their_names(tmp_path: Path, name: str) -> None:
    step = "Epoch 1/1 Step {0}/9 Train step {0}/9 done.\n│ ppo_actor/update/version_stats/{1} │ 1.5 │\n"
    (tmp_path / "run.log").write_text("".join(step.format(i, name) for i in range(1, 5)))
    assert (
        load(str(tmp_path / "run.log")).values["training/off_policy/trajectory_staleness/mean"].tolist()
        == [1.5] * 4
    )


def test_slimes_prompts_are_what_samples_have_beside_responses(tmp_path: Path) -> None:
    lengths = "'rollout/response_lengths': 900.0, 'rollout/total_lengths': 1040.0"
    line = f"rollout {{}}: {{{{'rollout/raw_reward': 0.5, {lengths}}}}}\n"
    (tmp_path / "run.log").write_text("".join(map(line.format, range(5))))
    assert load(str(tmp_path / "run.log")).values["prompt_length/mean"].tolist() == [140.0] * 5
