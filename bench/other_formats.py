"""The runs of `unseen_runs.py` as other frameworks and trackers would have logged them, with the names that they use.

Each logs less than verl: a fault is put only into the formats that can show it (`TELLS`).
"""

from __future__ import annotations

import csv
import json
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import unseen_runs
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose
from unseen_runs import Run

Array = NDArray[np.float64]
Rows = list[tuple[int, dict[str, float]]]
Lines = list[tuple[int, str]]
"""(after which row, text)"""

_STALE = "training/off_policy/trajectory_staleness/"
TRL = {
    "critic/rewards/mean": "reward",
    "response_length/mean": "completions/mean_length",
    "response_length/max": "completions/max_length",
    "response_length/min": "completions/min_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "actor/entropy": "entropy",
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "actor/kl_loss": "kl",
    "timing_s/step": "step_time",
    "training/epoch": "epoch",
    f"{_STALE}mean": "sample/staleness_mean",
    f"{_STALE}max": "sample/staleness_max",
}
SLIME = {
    "rollout": {"critic/rewards/mean": "rollout/raw_reward"},
    "perf": {
        "response_length/mean": "rollout/response_len/mean",
        "response_length/max": "rollout/response_len/max",
        "response_length/min": "rollout/response_len/min",
        "response_length/clip_ratio": "rollout/truncated_ratio",
        "response/aborted_ratio": "rollout/aborted_ratio",
        "training/filter_groups/evicted_samples": "rollout/dynamic_filter/drop_zero_std_0.0",
        "training/off_policy/evicted_samples": "rollout/fully_async/stale_groups_recycled",
        f"{_STALE}mean": "rollout/fully_async/avg_staleness",
        f"{_STALE}max": "rollout/fully_async/max_staleness",
        "timing_s/gen": "perf/rollout_time",
        "timing_s/update_actor": "perf/actor_train_time",
        "timing_s/old_log_prob": "perf/log_probs_time",
        "timing_s/update_weights": "perf/update_weights_time",
        "timing_s/step": "perf/step_time",
    },
    "step": {
        "actor/pg_loss": "train/pg_loss",
        "actor/entropy": "train/entropy_loss",
        "actor/grad_norm": "train/grad_norm",
        "actor/pg_clipfrac": "train/pg_clipfrac",
        "actor/ppo_kl": "train/ppo_kl",
        "actor/kl_loss": "train/kl_loss",
        "actor/lr": "train/lr-pg_0",
    },
}
_OF_ROLLOUT = frozenset(SLIME["rollout"].values())
AREAL = {
    "critic/rewards/mean": "ppo_actor/task_reward/avg",
    "critic/rewards/max": "ppo_actor/task_reward/max",
    "critic/rewards/min": "ppo_actor/task_reward/min",
    "response_length/mean": "ppo_actor/seq_len/avg",
    "response_length/max": "ppo_actor/seq_len/max",
    "response_length/min": "ppo_actor/seq_len/min",
    "response_length/clip_ratio": "ppo_actor/no_eos_ratios/avg",
    "prompt_length/mean": "ppo_actor/prompt_len/avg",
    "actor/entropy": "ppo_actor/update/entropy/avg",
    "actor/pg_loss": "ppo_actor/update/actor_loss/avg",
    "actor/pg_clipfrac": "ppo_actor/update/clip_ratio/avg",
    "actor/ppo_kl": "ppo_actor/update/approx_kl/avg",
    "actor/grad_norm": "ppo_actor/update/grad_norm",
    "actor/lr": "ppo_actor/update/lr",
    "rollout_corr/kl": "ppo_actor/update/behave_approx_kl/avg",
    f"{_STALE}mean": "ppo_actor/update/version_stats/sample_staleness_proximal_avg",
    f"{_STALE}max": "ppo_actor/update/version_stats/sample_staleness_proximal_max",
    f"{_STALE}min": "ppo_actor/update/version_stats/sample_staleness_proximal_min",
    "timing_s/gen": "timeperf/rollout",
    "timing_s/old_log_prob": "timeperf/recompute_logp",
    "timing_s/ref": "timeperf/ref_logp",
    "timing_s/adv": "timeperf/compute_advantages",
    "timing_s/update_actor": "timeperf/train_step",
    "timing_s/update_weights": "timeperf/update_weights",
}

SKYRL = {
    "critic/rewards/mean": "reward/avg_raw_reward",
    "response_length/mean": "generate/avg_num_tokens",
    "response_length/max": "generate/max_num_tokens",
    "response_length/min": "generate/min_num_tokens",
    "actor/entropy": "policy/policy_entropy",
    "actor/grad_norm": "policy/raw_grad_norm",
    "actor/pg_loss": "policy/final_loss",
    "actor/pg_clipfrac": "policy/ppo_clip_ratio",
    "actor/ppo_kl": "policy/ppo_approx_kl",
    "actor/lr": "policy/policy_lr",
    "training/epoch": "trainer/epoch",
    "training/global_step": "trainer/global_step",
    "timing_s/gen": "timing/generate",
    "timing_s/old_log_prob": "timing/fwd_logprobs_values_reward",
    "timing_s/adv": "timing/compute_advantages_and_returns",
    "timing_s/update_actor": "timing/policy_train",
    "timing_s/update_weights": "timing/sync_weights",
    "timing_s/save_checkpoint": "timing/save_checkpoints",
    "timing_s/testing": "timing/eval",
    "timing_s/step": "timing/step",
}

_ENGINE = {"missed_weight_sync", "engine_mismatch", "silent_error_after_wake", "mismatch_to_nan"}
_REWARD = {"all_wrong", "all_right", "discontinuity_after_resume"}
_ASYNC = {"stale_samples", "version_drift"}
_WORDS = {"collective_hang", "oom_in_sync"}
_WELL = set(unseen_runs.WELL)
TELLS: dict[str, frozenset[str]] = {
    "TRL": frozenset(_ENGINE | _REWARD | {"stale_samples"} | _WELL),
    "slime": frozenset(
        _ENGINE
        | _REWARD
        | _ASYNC
        | _WORDS
        | {"tail_burst", "filter_starvation", "buffer_never_fills"}
        | _WELL
    ),
    "AReaL": frozenset(_ENGINE | _REWARD | _ASYNC | _WORDS | {"tail_burst", "buffer_never_fills"} | _WELL),
    "W&B": frozenset({*unseen_runs.FAULTS, *unseen_runs.WELL}),
    "TensorBoard": frozenset({*unseen_runs.FAULTS, *unseen_runs.WELL}),
    "Prometheus": frozenset({*unseen_runs.FAULTS, *unseen_runs.WELL}),
}
"""Format -> what can be told from it."""


GAP = {
    "TRL": "sampling/sampling_logp_difference/mean",
    "slime": "train/train_rollout_logprob_abs_diff",
    "SkyRL": "policy/rollout_train_logprobs_abs_diff_mean",
}
"""Format -> its mean difference of the logprobs of engine and trainer, where it logs one."""


def gap_nats(probs_diff: Array) -> Array:
    """The mean difference of logprobs that goes with the difference of probabilities: about one and a half times it."""
    return 1.5 * probs_diff


def renamed(rows: Rows, names: dict[str, str], own: tuple[str, ...] = ()) -> Rows:
    """Rows in another system's names; what it has no name for is lost, unless its prefix is among its owner's."""
    return [
        (step, {names.get(k, k): v for k, v in data.items() if k in names or k.startswith(own)})
        for step, data in rows
    ]


def trl(rows: Rows, _: Lines, path: Path) -> Path:
    """`trainer_state.json`."""
    history = [{**data, "step": step} for step, data in rows]
    path = path.with_name("trainer_state.json")
    path.write_text(json.dumps({"global_step": history[-1]["step"], "log_history": history}))
    return path


def slime(rows: Rows, text: Lines, path: Path) -> Path:
    """The console."""
    lines = []
    for i, (step, data) in enumerate(rows):
        kinds: dict[str, dict[str, float]] = {"rollout": {}, "perf": {}, "step": {}}
        for name, value in data.items():
            kind = "step" if name.startswith("train/") else "rollout" if name in _OF_ROLLOUT else "perf"
            kinds[kind][name] = value
        for kind, entry in kinds.items():
            lines.append(f"\x1b[36m(Actor pid=88)\x1b[0m [2026-10-30] log.py:11 - {kind} {step}: {entry!r}")
        lines += [line if line[0] == "(" else f"(Actor pid=88) {line}" for at, line in text if at == i]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def areal(rows: Rows, text: Lines, path: Path) -> Path:
    """The console, with its tables."""
    lines = []
    for i, (step, data) in enumerate(rows):
        lines.append(
            f"20261030-10:11:12.123 StatsLogger INFO: Epoch 1/9 Step {step}/999 Train step {step}/9999 done."
        )
        cells = [f"{name} │ {value:.4e}" for name, value in data.items()]
        lines += ["│ " + " │ ".join(cells[k : k + 2]) + " │" for k in range(0, len(cells), 2)]
        lines += [line for at, line in text if at == i]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def wandb(rows: Rows, _: Lines, path: Path) -> Path:
    """A history as CSV."""
    names = sorted({name for _, data in rows for name in data})
    path = path.with_suffix(".csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["_step", "_timestamp", *names])
        for i, (step, data) in enumerate(rows):
            cells = [str(data[name]) if name in data else "" for name in names]
            writer.writerow([str(step), str(1.7e9 + 60 * i), *cells])
    return path


def tensorboard(rows: Rows, _: Lines, path: Path) -> Path:
    """An event file, record by record."""
    path = path.with_name("events.out.tfevents.1700000000.host.1.0")
    with path.open("wb") as file:
        for step, data in rows:
            summary = b"".join(
                _field(1, 2, _field(1, 2, name.encode()) + _field(2, 5, struct.pack("<f", value)))
                for name, value in data.items()
            )
            event = (
                _field(1, 1, struct.pack("<d", 1.7e9 + step))
                + _field(2, 0, _varint(step))
                + _field(5, 2, summary)
            )
            file.write(struct.pack("<QI", len(event), 0) + event + struct.pack("<I", 0))
    return path


def _field(number: int, wire: int, payload: bytes) -> bytes:
    return bytes([number << 3 | wire]) + (_varint(len(payload)) if wire == 2 else b"") + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


NAMES = {
    "TRL": TRL,
    "slime": {k: v for part in SLIME.values() for k, v in part.items()},
    "AReaL": AREAL,
    "SkyRL": SKYRL,
}
"""Format -> verl's name -> its own. What is not here takes verl's."""
WRITERS: dict[str, Callable[[Rows, Lines, Path], Path]] = {
    "TRL": trl,
    "slime": slime,
    "AReaL": areal,
    "W&B": wandb,
    "TensorBoard": tensorboard,
    "SkyRL": wandb,
}


def told(format: str, run: Run, path: Path) -> Path:
    """One of the runs as this format's system would have logged it."""
    if format in GAP:
        run.table[GAP[format]] = gap_nats(run.table["training/rollout_probs_diff_mean"])
    rows = unseen_runs.rows(run, has_gap=format == "AReaL")
    if format in NAMES:
        rows = renamed(rows, NAMES[format], tuple(GAP.values()))
    return WRITERS[format](rows, run.text, path)


@contextmanager
def prometheus(run: Run) -> Iterator[str]:
    """The URL of a server that scraped the run every fifteen seconds; a step takes a minute."""
    series: dict[str, list[list[object]]] = {}
    rows = unseen_runs.rows(run)
    for i, (step, data) in enumerate(rows):
        for name, value in {**data, "training/global_step": float(step)}.items():
            values = series.setdefault(name, [])
            values += [[1.7e9 + 60 * i + 15 * k, "NaN" if np.isnan(value) else repr(value)] for k in range(4)]
    result = [
        {"metric": {"__name__": "rollbook_x", "run": "r", "metric": name}, "values": values}
        for name, values in series.items()
    ]
    body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def verdict(format: str, name: str, seed: int, folder: Path) -> str | None:
    """The verdict on one run in one format; None where nothing of it is in such a log."""
    if name not in TELLS[format]:
        return None
    run = unseen_runs.make(name, seed)
    if name in unseen_runs.FAULTS and run.only_words and format not in ("slime", "AReaL"):
        return None
    if format != "Prometheus":
        return diagnose(load(str(told(format, run, folder / "run.log")))).verdict
    run.back = 0  # a scrape has one value a time
    with prometheus(run) as url:
        return diagnose(load(url)).verdict
