"""What asynchrony brings and costs on this machine: seven demonstrations through rollbook's own loop.

    python bench/async.py                      # all of them, about fifteen minutes on two quiet cores
    python bench/async.py --quick              # less of everything, under a minute; writes nothing into docs/
    python bench/async.py wallclock order      # some of: equal staleness wallclock processes lending mismatch order

Every run goes through `rollbook.controller.entry`, with engine and trainer on one thread each, in `processes` also as
Ray actors (extra `ray`). Numbers go to bench/results/async.json and into the tables of docs/async.md, pictures to
docs/img/async-*.svg. Predictions are written before the run that they are of.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch

from rollbook.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from rollbook.config.loading import to_toml
from rollbook.config.run_config import RunConfig
from rollbook.controller.entry import start_run
from rollbook.controller.gap import MAX_FRESH
from rollbook.controller.loop import Controller
from rollbook.controller.plan import Plan
from rollbook.ledger.hardware import Contention
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.predict import stages_after_rollout
from rollbook.planner.sim_scenario import DecodeTable, Scenario
from rollbook.planner.simulate import simulate
from svg_plot import Line, line_chart

ROOT = Path(__file__).parents[1]
Json = dict[str, Any]

LEARNING: Json = {
    "run": {"groups_per_step": 16},
    "model": {
        "new": {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 128,
            "initializer_range": 0.1,
            "max_position": 32,
            "alphabet": "0123456789+=",
        }
    },
    "data": {"sources": [{"task": "addition", "options": {"num_digits": 1}}]},
    "reward": {"terms": [{"function": "digits"}]},
    "rollout": {
        "group_size": 8,
        "max_response_tokens": 4,
        "num_slots": 512,
        "kv_pool_tokens": 16_384,
        "page_tokens": 16,
        "num_threads": 1,
    },
    "trainer": {"lr": 7e-4, "num_mini_batches": 2, "num_threads": 1},
    "plan": {"is_on": False},
    "observe": {"terminal": "off", "trajectories_every_steps": 0},
    "checkpoint": {"save_model": False},
}
"""Addition of one-digit numbers, after a short supervised warm-up that all runs share: a policy that still moves."""

LONG_TAILED: Json = {
    "run": {"groups_per_step": 16},
    "model": {
        "new": {
            "hidden_size": 128,
            "num_layers": 3,
            "num_heads": 4,
            "intermediate_size": 384,
            "initializer_range": 0.02,
            "max_position": 512,
            "alphabet": "abcdefghijklmnopqrstuvwxyz>",
            "vocab_size": 64,
        }
    },
    "data": {"sources": [{"task": "reverse", "num_prompts": 4096}]},
    "reward": {"terms": [{"function": "digits", "is_tested": False}]},
    "rollout": {
        "group_size": 4,
        "max_response_tokens": 480,
        "num_slots": 64,
        "kv_pool_tokens": 32_768,
        "page_tokens": 32,
        "num_threads": 1,
    },
    "trainer": {"lr": 1e-7, "num_threads": 1},
    "plan": {"is_on": False},
    "observe": {"terminal": "off", "trajectories_every_steps": 0},
    "checkpoint": {"save_model": False},
}
"""An untrained model ends a response with probability 1/64 at each token: lengths are geometric, the longest of a
step's 64 responses about five times the mean. All of it is real decode work. The learning rate keeps it so."""


@dataclass(frozen=True)
class Run:
    """What one run left behind."""

    folder: Path
    wall_s: float

    @property
    def metrics(self) -> list[Json]:
        steps: dict[int, Json] = {}
        for line in (self.folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            steps.setdefault(row["step"], {}).update(row["data"])
        return [steps[step] for step in sorted(steps)]

    def curve(self, name: str) -> list[float]:
        return [m[name] for m in self.metrics if m.get(name) is not None]

    def mean(self, name: str, *, skip: int = 0) -> float:
        values = self.curve(name)[skip:]
        return float(np.mean(values)) if values else float("nan")

    def responses(self) -> list[Json]:
        """Trajectories on disk, in the order of their admission: length, and whether it was trained."""
        rows: list[Json] = []
        for path in sorted((self.folder / "trajectories").glob("step_*.parquet")):
            rows += pyarrow.parquet.read_table(path).to_pylist()
        rows.sort(key=lambda row: (row["group_id"], row["member_idx"]))
        return [
            {
                "num_tokens": len(row["token_ids"]) - row["num_prompt_tokens"],
                "is_trained": row["loss_mask"] is not None,
            }
            for row in rows
        ]

    def masters(self) -> dict[str, torch.Tensor]:
        folder = self.folder / "checkpoints"
        state = load_checkpoint(folder / f"step_{list_checkpoints(folder)[-1]}")
        masters: dict[str, torch.Tensor] = state["trainer"]["policy"]["masters"]
        return masters


@dataclass(frozen=True)
class Bench:
    """Where runs go, and how much of everything."""

    folder: Path
    is_quick: bool

    def path(self, name: str, base: Mapping[str, Any], num_steps: int) -> Path:
        run = {**base["run"], "name": name, "dir": str(self.folder), "num_steps": num_steps}
        path = self.folder / f"{name}.toml"
        path.write_text(to_toml({**base, "run": run}), encoding="utf-8")
        return path

    def run(
        self,
        name: str,
        base: Mapping[str, Any],
        num_steps: int,
        *,
        on_built: Callable[[Controller], None] | None = None,
        **overrides: Any,
    ) -> Run:
        started_s = time.perf_counter()
        folder = start_run(self.path(name, base, num_steps), as_set(overrides), on_built=on_built)
        return Run(folder, time.perf_counter() - started_s)

    def pick(self, full: int, quick: int) -> int:
        return quick if self.is_quick else full


def as_set(overrides: Mapping[str, Any]) -> list[str]:
    return [f"{key}={to_toml({'x': value}).partition('=')[2].strip()}" for key, value in overrides.items()]


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Means of `width` neighbors, shorter at the start."""
    return [float(np.mean(values[max(0, i - width + 1) : i + 1])) for i in range(len(values))]


# ---- 1. the same parameters


def equal(bench: Bench) -> Json:
    """At staleness 0 `separate_async` is `sync`, bit for bit."""
    base = {**LEARNING, "rollout": {**LEARNING["rollout"], "batch_invariant": True, "num_slots": 64}}
    steps = bench.pick(30, 4)
    sync = bench.run("equal-sync", base, steps)
    apart = bench.run("equal-separate", base, steps, **{"run.schedule": "separate_async"})
    different = [n for n, t in sync.masters().items() if not t.equal(apart.masters()[n])]
    return {
        "num_steps": steps,
        "num_tensors": len(sync.masters()),
        "num_different_tensors": len(different),
        "last_reward_sync": sync.curve("reward/addition/mean")[-1],
        "last_reward_separate_async": apart.curve("reward/addition/mean")[-1],
    }


# ---- 2. staleness and the decoupled correction

CORRECTIONS: Mapping[str, Json] = {
    "uncorrected": {"algorithm.correction.level": "none"},
    "decoupled": {"algorithm.correction.level": "token", "algorithm.correction.upper": 2.0},
    "coupled": {"algorithm.proximal": "behavior"},
}
"""uncorrected: the trust region stands around the proximal policy, and stale tokens count as if it had sampled them.
decoupled: the same with importance weights. coupled: it stands around the behavior policy (PPO as published)."""


def warm_model(bench: Bench) -> Json:
    """The shared starting point: `LEARNING` with its model after a supervised warm-up."""
    folder = bench.folder / "warm"
    if not folder.exists():
        base = {**LEARNING, "checkpoint": {"save_model": True}}
        warmup = {"warmup.num_updates": 30, "warmup.batch_sequences": 64, "warmup.learning_rate": 3e-3}
        bench.run("warm", base, 0, **warmup)
    return {**LEARNING, "model": {"path": str(folder / "model")}}


def curves(runs: Sequence[Run], name: str) -> Json:
    """Mean and spread over seeds of one metric, step by step."""
    table = np.array([run.curve(name) for run in runs])
    return {
        "mean": table.mean(0).round(4).tolist(),
        "low": table.min(0).round(4).tolist(),
        "high": table.max(0).round(4).tolist(),
        "last_fifth": round(float(table[:, -max(table.shape[1] // 5, 1) :].mean()), 4),
    }


def staleness(bench: Bench) -> Json:
    """Reward curves at staleness 0 to 8, with and without importance weights."""
    base, steps = warm_model(bench), bench.pick(60, 6)
    seeds = range(bench.pick(2, 1))
    found: Json = {"num_steps": steps, "num_seeds": len(seeds), "runs": {}}
    for bound in (0, 4) if bench.is_quick else (0, 1, 2, 4, 8):
        for name, overrides in CORRECTIONS.items():
            if bound == 0 and name != "uncorrected":
                continue  # on policy every weight is 1 and both anchors are the same
            schedule = "separate_async" if bound else "sync"
            runs = [
                bench.run(
                    f"staleness-{bound}-{name}-{seed}",
                    base,
                    steps,
                    **{
                        "run.schedule": schedule,
                        "run.seed": seed,
                        "buffer.max_staleness_steps": bound,
                        **overrides,
                    },
                )
                for seed in seeds
            ]
            found["runs"][f"{bound} {name}"] = {
                "bound": bound,
                "correction": name,
                "reward": curves(runs, "reward/addition/mean"),
                "staleness_mean": round(
                    float(
                        np.mean([r.mean("training/off_policy/trajectory_staleness_worst/mean") for r in runs])
                    ),
                    3,
                ),
                "step_s": round(float(np.median([r.mean("timing_s/step", skip=2) for r in runs])), 4),
                "gap_all_mean_nats": round(
                    float(np.mean([r.mean("training/logprob_gap_all/mean") for r in runs])), 5
                ),
            }
    return found


def draw_staleness(found: Json) -> str:
    bounds = sorted({run["bound"] for run in found["runs"].values()})
    lines = [
        Line(
            f"{run['bound']} steps" + (f", {run['correction']}" if run["bound"] else ""),
            range(found["num_steps"]),
            smooth(run["reward"]["mean"], 5),
            color=bounds.index(run["bound"]) + (4 if run["correction"] == "coupled" else 0),
            is_dashed=run["correction"] == "uncorrected" and run["bound"] > 0,
        )
        for run in found["runs"].values()
        if run["bound"] in (0, 2, 8) or len(bounds) < 4
    ]
    title = "Reward by staleness bound and correction"
    return line_chart(title, "step", "reward", lines)


# ---- 3. wall clock on long-tailed lengths


def predict(plan: Plan, config: RunConfig, lengths: Sequence[int], *, counted: slice) -> float:
    """Mean seconds of the counted steps by the planner's discrete-event simulation, from the run's own coefficients,
    for responses of these lengths in their order."""
    contention = (plan.machine.contention if plan.work.generates_beside else None) or Contention()
    trainer_frac = 1.0
    """Share of the time in which the trainer computes: only then the engine is slower."""
    for _ in range(4):
        slower = 1 / (trainer_frac / contention.engine + 1 - trainer_frac)
        scenario = scenario_of(plan, config, lengths, contention=contention, engine_slower=slower)
        steps = simulate(scenario).steps[counted]
        elapsed_s = steps[-1].end_s - steps[0].start_s
        trainer_frac = 1 - sum(step.wait_s for step in steps) / elapsed_s
    return elapsed_s / len(steps)


def scenario_of(
    plan: Plan, config: RunConfig, lengths: Sequence[int], *, contention: Contention, engine_slower: float
) -> Scenario:
    """The run, with every second of the engine `engine_slower` times as long."""
    machine, schedule = plan.machine, config.run.schedule
    assert machine.decode is not None and machine.train is not None
    distribution = LengthDistribution.from_samples(lengths, max_tokens=config.rollout.max_response_tokens)
    work = replace(plan.work, lengths=distribution)
    # With the trainer alone first: the simulation lets the sides wait for each other by itself.
    seconds = {
        name: contention.of(name) * entry.seconds
        for name, entry in stages_after_rollout(plan.model, machine, work).items()
    }
    if plan.work.generates_beside and config.cluster.kind == "inproc":
        # Responses scored beside the batch, for the gap of the trainer's own version.
        fresh_tokens = MAX_FRESH * (work.prompt_tokens + float(np.mean(lengths)))
        seconds["train"] += contention.trainer * fresh_tokens / machine.train.forward_tokens_per_s
    slots = config.rollout.num_slots
    # Of requests and scores a step in turns waits for the last; engines that run ahead have others meanwhile.
    host_s = 0.0 if plan.work.generates_beside else machine.reward_s * work.num_sequences
    decode, held = machine.decode.scaled(engine_slower), itertools.cycle(lengths)
    return Scenario(
        mode=schedule,
        num_replicas=1,
        slots_per_replica=slots,
        decode=DecodeTable.of(
            lambda rows, context: decode.step_s(rows, rows * context),
            num_slots=slots,
            context_tokens=float(config.rollout.max_response_tokens),
        ),
        groups_per_step=config.run.groups_per_step,
        group_size=config.rollout.group_size,
        response_tokens=lambda rng, n: np.fromiter(itertools.islice(held, n), np.float64, n),
        prompt_tokens=work.prompt_tokens / config.rollout.group_size,  # the members share one prefill
        prefill_token_s=1 / decode.prefill_tokens_per_s,
        forward_s=host_s + sum(seconds.get(name, 0.0) for name in ("pack", "proximal", "adv")),
        train_s=seconds["train"] + seconds.get("other", 0.0),
        gather_s=seconds["sync"] if schedule == "separate_async" else 0.0,
        sync_pause_s=0.0 if schedule == "separate_async" else seconds["sync"],
        max_staleness_steps=config.buffer.max_staleness_steps,
        num_steps=config.run.num_steps,
    )


ASYNC: Json = {"run.schedule": "separate_async", "buffer.max_staleness_steps": 4}
THREADS: Mapping[str, Json] = {
    "sync, one core": {"run.schedule": "sync"},
    "sync, both cores": {"run.schedule": "sync", "rollout.num_threads": 2, "trainer.num_threads": 2},
    "separate_async, one core each": ASYNC,
}
"""Engine and trainer in one process, which share its interpreter. The last one is compared with the others."""
PROCESSES: Mapping[str, Json] = {
    "separate_async, one process": ASYNC,
    "sync, processes of their own": {"run.schedule": "sync", "cluster.kind": "ray"},
    "separate_async, processes of their own": {**ASYNC, "cluster.kind": "ray"},
}
"""Engine and trainer as Ray actors, one core each."""


def wallclock(bench: Bench, modes: Mapping[str, Json] = THREADS) -> Json:
    """Async against sync where lengths are long-tailed. Every run is calibrated as any run is, and its prediction
    written before its first step; the modes take turns, so that what else the machine does meets all of them."""
    steps, num_rounds = bench.pick(25, 10), bench.pick(2, 1)
    # From where the pipeline is full to where nothing is left to be generated ahead.
    counted = slice(bench.pick(5, 2), steps - ASYNC["buffer.max_staleness_steps"] - 1)
    base = {**LONG_TAILED, "plan": {"is_on": True}}
    # The pilot answers the prompts of the runs in one step, before any of them: with this learning rate nobody's
    # responses differ, and prediction and measurement are of the same work.
    pilot_overrides = {"run.groups_per_step": 16 * steps, "observe.trajectories_every_steps": 1}
    pilot = bench.run("wallclock-pilot", LONG_TAILED, 1, **pilot_overrides)
    lengths = [row["num_tokens"] for row in pilot.responses()]
    found: Json = {
        "num_steps": steps,
        "num_rounds": num_rounds,
        "lengths": {
            "num": len(lengths),
            "mean": float(np.mean(lengths)),
            "p50": float(np.median(lengths)),
            "p99": float(np.quantile(lengths, 0.99)),
            "max": max(lengths),
        },
    }
    rounds: dict[str, list[Json]] = {name: [] for name in modes}
    for number, (name, overrides) in itertools.product(range(num_rounds), modes.items()):
        before: Json = {}

        def on_plan(controller: Controller, name: str = name, before: Json = before) -> None:
            plan = controller.expected.plan
            assert plan is not None
            before |= {
                "predicted_step_s": predict(plan, controller.config, lengths, counted=counted),
                "planned_step_s": sum(entry.seconds for entry in plan.stages.values()),
                "planned_s": {stage: entry.seconds for stage, entry in plan.stages.items()},
                "contention": None if plan.machine.contention is None else asdict(plan.machine.contention),
            }
            print(f"before {name}: {json.dumps(before)}", flush=True)

        torch.set_num_threads(overrides.get("trainer.num_threads", 1))
        slug = name.replace(", ", "-").replace(" ", "-")
        run = bench.run(f"wallclock-{slug}-{number}", base, steps, on_built=at_plan(on_plan), **overrides)
        step_s = run.curve("timing_s/step")[counted]
        rounds[name].append(
            before
            | {
                "step_s": mean_of(step_s),
                "step_s_each": [round(value, 3) for value in step_s],
                "tokens_per_s": mean_of(run.curve("perf/total_num_tokens")[counted]) / mean_of(step_s),
                "mean_batch": mean_of(run.curve("rollout/mean_batch")[counted]),
                "stages_s": {
                    metric.removeprefix("timing_s/"): mean_of(run.curve(metric)[counted])
                    for metric in run.metrics[0]
                    if metric.startswith("timing_s/")
                },
                "staleness_max": max(run.curve("training/off_policy/trajectory_staleness_worst/max")),
            }
        )
        print(f"after {name}: {json.dumps(brief(finite(rounds[name][-1])))}", flush=True)
    torch.set_num_threads(1)
    found["rounds"] = rounds
    found["modes"] = {name: mean_mode(each) for name, each in rounds.items()}
    *others, ours = modes
    for name in others:
        other, apart = found["modes"][name], found["modes"][ours]
        speedup = {
            "measured": other["step_s"] / apart["step_s"],
            "predicted": other["predicted_step_s"] / apart["predicted_step_s"],
        }
        speedup["predicted_over_measured"] = speedup["predicted"] / speedup["measured"]
        found[f"speedup_over {name}"] = speedup
    return found


def at_plan(then: Callable[[Controller], None]) -> Callable[[Controller], None]:
    """For `start_run`: calls `then` when the run says its plan, before its first step."""

    def on_built(controller: Controller) -> None:
        event = controller.recorder.event

        def watched(kind: str, **fields: Any) -> None:
            event(kind, **fields)
            if kind == "plan":
                then(controller)

        controller.recorder.event = watched  # type: ignore[method-assign]

    return on_built


def mean_mode(rounds: Sequence[Json]) -> Json:
    """Means of the numbers of several runs; what is a list keeps one after the other."""
    whole: Json = {}
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        if isinstance(values[0], dict):
            whole[name] = mean_mode(values)
        elif isinstance(values[0], list):
            whole[name] = list(itertools.chain(*values))
        else:
            whole[name] = None if values[0] is None else float(np.mean(values))
    return whole


def draw_wallclock(found: Json) -> str:
    lines = []
    for color, (name, mode) in enumerate(found["modes"].items()):
        done_s = np.cumsum(mode["step_s_each"])
        steps = list(range(1, len(done_s) + 1))
        lines.append(Line(name.replace("separate_async", "async"), [0, *done_s], [0, *steps], color=color))
        planned = [0.0, mode["predicted_step_s"] * len(steps)]
        lines.append(Line("  predicted", planned, [0, len(steps)], color=color, is_dashed=True))
    return line_chart("Steps made, long-tailed responses; dashed: predicted before", "seconds", "", lines)


# ---- lending

FLAT: Json = {
    "reward": {"terms": [{"function": "exact", "is_tested": False}]},
    "algorithm": {"filter": {"drop_flat": True}},
}
"""Every response of an untrained model scores 0, and flat groups are not trained: steps are waits, and little else."""
NARROW: Json = {**LONG_TAILED, **FLAT}
WIDE: Json = {
    **NARROW,
    "run": {"groups_per_step": 32},
    "model": {
        "new": {
            **LONG_TAILED["model"]["new"],
            "hidden_size": 512,
            "num_heads": 8,
            "intermediate_size": 1408,
        }
    },
    "rollout": {**LONG_TAILED["rollout"], "group_size": 8, "num_slots": 256, "max_response_tokens": 32},
}
"""256 sequences at a time and wide products: a decode step is arithmetic, which two threads do side by side, and not
Python, which one has at a time. Responses are of similar length, so that the sequences are many until the end."""


def lending(bench: Bench) -> Json:
    """A run with the trainer's core lent on trial: waits with it, waits without it, and what the run made of them."""
    steps = bench.pick(13, 7)
    found: Json = {"num_steps": steps, "runs": {}}
    for name, base in (("narrow", NARROW), ("wide", WIDE)):
        asked: Json = {"run.schedule": "separate_async", "lending.is_on": True}
        run = bench.run(f"lending-{name}", base, steps, **asked)
        events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
        lent = sorted(event["step"] for event in events if event["kind"] == "lent")
        verdicts = [event for event in events if event["kind"] == "lending_judged"]
        waits, tokens = run.curve("timing_s/gen"), run.curve("generated/num_tokens")
        ups = [event["up_s"] for event in events if event["kind"] == "lent"]
        # The first wait is only measured, the first lending warms up.
        kinds = {"lent": lent[1:], "alone": [i for i in range(1, steps) if i not in lent]}
        found["runs"][name] = {
            "hidden_size": base["model"]["new"]["hidden_size"],
            "num_sequences": base["run"]["groups_per_step"] * base["rollout"]["group_size"],
            "lent_steps": lent,
            "up_s": mean_of(ups),
            "waits_s": [round(value, 3) for value in waits],
            "saved_s": [event["saved_s"] for event in events if event["kind"] == "taken_back"],
            **{f"{kind}_wait_s": mean_of([waits[i] for i in chosen]) for kind, chosen in kinds.items()},
            **{
                f"{kind}_tokens_per_s": sum(tokens[i] for i in chosen)
                / max(sum(waits[i] for i in chosen), 1e-9)
                for kind, chosen in kinds.items()
            },
            "verdict": None if not verdicts else {key: verdicts[0][key] for key in ("pays", "step")},
        }
    return found


def mean_of(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


# ---- 4. engine mismatch


def mismatch(bench: Bench) -> Json:
    """Engines that sample from rounded weights, with importance weights and without."""
    base, steps = warm_model(bench), bench.pick(60, 6)
    seeds = range(bench.pick(2, 1))
    found: Json = {"num_steps": steps, "num_seeds": len(seeds), "runs": {}}
    for kind in ("none", "int4") if bench.is_quick else ("none", "bf16", "fp8", "int8", "int4"):
        for name, overrides in CORRECTIONS.items():
            if name == "coupled" or (name == "decoupled" and kind in ("none", "bf16", "fp8")):
                continue
            runs = [
                bench.run(
                    f"mismatch-{kind}-{name}-{seed}",
                    base,
                    steps,
                    **{"run.seed": seed, "rollout.mismatch": kind, **overrides},
                )
                for seed in seeds
            ]
            found["runs"][f"{kind} {name}"] = {
                "mismatch": kind,
                "correction": name,
                "reward": curves(runs, "reward/addition/mean"),
                "weight_error_frac": runs[0].mean("rollout/mismatch_error_frac"),
                "gap_mean_nats": runs[0].mean("training/logprob_gap/mean"),
                "gap_p99_nats": runs[0].mean("training/logprob_gap/p99"),
                "outside_clip_frac": runs[0].mean("training/logprob_gap/outside_clip_frac"),
            }
    return found


def draw_mismatch(found: Json) -> str:
    kinds = list(dict.fromkeys(run["mismatch"] for run in found["runs"].values()))
    lines = [
        Line(
            run["mismatch"] + (", corrected" if run["correction"] == "decoupled" else ""),
            range(found["num_steps"]),
            smooth(run["reward"]["mean"], 5),
            color=kinds.index(run["mismatch"]),
            is_dashed=run["correction"] != "decoupled" and run["mismatch"] != "none",
        )
        for run in found["runs"].values()
    ]
    title = "Reward of an engine with rounded weights; dashed: without importance weights"
    return line_chart(title, "step", "reward", lines)


# ---- 5. arrival against admission order


def order(bench: Bench) -> Json:
    """Which responses reach the trainer when the first to finish is taken first."""
    steps = bench.pick(24, 5)
    base = {**LONG_TAILED, "run": {"groups_per_step": 8}}
    base["model"] = {"new": {**LONG_TAILED["model"]["new"], "hidden_size": 48, "num_layers": 1}}
    found: Json = {"num_steps": steps, "orders": {}}
    orders: Mapping[str, Json] = {
        "admission": {"buffer.order": "admission"},
        "arrival, wait": {"buffer.order": "arrival", "buffer.when_stale": "wait"},
        "arrival, drop": {"buffer.order": "arrival", "buffer.when_stale": "drop"},
    }
    for name, overrides in orders.items():
        run = bench.run(
            f"order-{name.replace(', ', '-')}",
            base,
            steps,
            **{
                "run.schedule": "separate_async",
                "buffer.max_staleness_steps": 1,
                "observe.trajectories_every_steps": 1,
                **overrides,
            },
        )
        rows = run.responses()
        trained = [row["num_tokens"] for row in rows if row["is_trained"]]
        evicted = [row["num_tokens"] for row in rows if not row["is_trained"]]
        found["orders"][name] = {
            "trained_mean_tokens": float(np.mean(trained)),
            "trained_mean_tokens_by_step": [round(v, 1) for v in run.curve("response_length/mean")],
            "trained_p99_tokens": float(np.quantile(trained, 0.99)),
            "evicted_mean_tokens": float(np.mean(evicted)) if evicted else None,
            "evicted_frac": len(evicted) / len(rows),
            "step_s": run.mean("timing_s/step", skip=2),
        }
    return found


def draw_order(found: Json) -> str:
    lines = []
    for color, (name, one) in enumerate(found["orders"].items()):
        values = one["trained_mean_tokens_by_step"]
        running = [float(np.mean(values[: i + 1])) for i in range(len(values))]
        lines.append(Line(name, range(len(values)), running, color=color))
    return line_chart("Mean tokens of the trained responses, up to this step", "step", "", lines)


# ---- the page


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tell_equal(found: Json) -> str:
    return (
        f"{found['num_different_tensors']} of {found['num_tensors']} tensors differ after {found['num_steps']} steps "
        f"(reward of the last step {found['last_reward_sync']:.3f} in both)."
    )


def tell_staleness(found: Json) -> str:
    rows = [
        [
            str(run["bound"]),
            run["correction"] if run["bound"] else "none needed",
            f"{run['staleness_mean']:.2f}",
            f"{run['gap_all_mean_nats']:.3f}" if run["gap_all_mean_nats"] == run["gap_all_mean_nats"] else "",
            f"{run['reward']['last_fifth']:.3f}",
            f"{run['step_s']:.3f}",
        ]
        for run in found["runs"].values()
    ]
    header = ["bound", "correction", "mean staleness", "gap, nats", "reward, last fifth", "s a step"]
    return table(header, rows) + (
        f"\n\n{found['num_steps']} steps, mean of {found['num_seeds']} seeds, one-digit addition after a short warm-up."
    )


def tell_wallclock(found: Json) -> str:
    rows = [
        [
            name,
            f"{m['predicted_step_s']:.2f}",
            f"{m['step_s']:.2f}",
            f"{m['mean_batch']:.1f}",
            f"{m['tokens_per_s']:.0f}",
        ]
        for name, m in found["modes"].items()
    ]
    lengths = found["lengths"]
    speedups = "; ".join(
        f"over {name.removeprefix('speedup_over ')} {s['measured']:.2f} x (predicted {s['predicted']:.2f})"
        for name, s in found.items()
        if name.startswith("speedup_over")
    )
    ours = list(found["modes"])[-1]
    return table(
        ["mode", "predicted s a step", "measured", "sequences in a decode step", "tokens/s"], rows
    ) + (
        f"\n\nResponses of {lengths['mean']:.0f} tokens on average, p99 {lengths['p99']:.0f}, longest "
        f"{lengths['max']}. {ours} is faster: {speedups}."
    )


def tell_mismatch(found: Json) -> str:
    rows = [
        [
            run["mismatch"],
            run["correction"],
            "" if run["mismatch"] == "none" else f"{run['weight_error_frac']:.4f}",
            f"{run['gap_mean_nats']:.2g}",
            f"{run['gap_p99_nats']:.2g}",
            f"{run['outside_clip_frac']:.4f}",
            f"{run['reward']['last_fifth']:.3f}",
        ]
        for run in found["runs"].values()
    ]
    header = [
        "rounding", "correction", "weight error", "gap, nats", "p99", "outside the clip band", "reward, last fifth",
    ]  # fmt: skip
    return table(header, rows)


def tell_order(found: Json) -> str:
    rows = [
        [
            name,
            f"{one['trained_mean_tokens']:.1f}",
            f"{one['trained_p99_tokens']:.0f}",
            f"{one['evicted_frac']:.3f}",
            "" if one["evicted_mean_tokens"] is None else f"{one['evicted_mean_tokens']:.1f}",
            f"{one['step_s']:.3f}",
        ]
        for name, one in found["orders"].items()
    ]
    return table(
        ["order", "trained tokens, mean", "p99", "evicted share", "evicted tokens, mean", "s a step"], rows
    )


def tell_lending(found: Json) -> str:
    rows = []
    for one in found["runs"].values():
        verdict = one["verdict"]
        said = "none yet" if verdict is None else "kept" if verdict["pays"] else "stopped"
        rows.append(
            [
                f"{one['hidden_size']}, {one['num_sequences']}",
                f"{one['alone_wait_s']:.2f}",
                f"{one['lent_wait_s']:.2f}",
                f"{one['up_s']:.2f}",
                f"{one['alone_tokens_per_s']:.0f}",
                f"{one['lent_tokens_per_s']:.0f}",
                said if verdict is None else f"{said} after step {verdict['step']}",
            ]
        )
    heads = [
        "model width, sequences",
        "a wait alone, s",
        "with the trainer's core lent, s",
        "of it bringing up, s",
        "tokens/s alone",
        "tokens/s lent",
        "what the run did",
    ]
    return table(heads, rows)


def write_page(name: str, text: str) -> None:
    """Put `text` between the marks of this part in docs/async.md."""
    path = ROOT / "docs" / "async.md"
    before, begin, rest = path.read_text().partition(f"<!-- async:{name} -->\n")
    _, end, after = rest.partition(f"<!-- /async:{name} -->")
    assert begin and end, f"docs/async.md has no marks for {name}"
    path.write_text(f"{before}{begin}{text}\n{end}{after}", encoding="utf-8")


@dataclass(frozen=True)
class Part:
    measure: Callable[[Bench], Json]
    tell: Callable[[Json], str]
    draw: Callable[[Json], str] | None = None


PARTS: Mapping[str, Part] = {
    "equal": Part(equal, tell_equal),
    "staleness": Part(staleness, tell_staleness, draw_staleness),
    "wallclock": Part(wallclock, tell_wallclock, draw_wallclock),
    "processes": Part(partial(wallclock, modes=PROCESSES), tell_wallclock),
    "lending": Part(lending, tell_lending),
    "mismatch": Part(mismatch, tell_mismatch, draw_mismatch),
    "order": Part(order, tell_order, draw_order),
}


def finite(value: Any) -> Any:
    """As JSON knows it: what was not measured is null."""
    if isinstance(value, dict):
        return {key: finite(held) for key, held in value.items()}
    if isinstance(value, list):
        return [finite(held) for held in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def brief(value: Any) -> Any:
    """Without the curves, for the terminal."""
    if isinstance(value, dict):
        return {
            k: brief(v)
            for k, v in value.items()
            if k not in ("mean", "low", "high") or not isinstance(v, list)
        }
    if isinstance(value, float):
        return round(value, 4)
    return value if not isinstance(value, list) or len(value) < 8 else f"[{len(value)} numbers]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="of: " + ", ".join(PARTS))
    parser.add_argument(
        "--quick", action="store_true", help="less of everything; nothing is written into docs/"
    )
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    torch.set_num_threads(1)
    results_path = ROOT / "bench" / "results" / "async.json"
    results: Json = json.loads(results_path.read_text()) if results_path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.quick)
        for name in options.parts or PARTS:
            part = PARTS[name]
            started_s, load = time.perf_counter(), os.getloadavg()[0]
            found = part.measure(bench)
            found["machine"] = {
                "cores": len(os.sched_getaffinity(0)),
                "processor": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "load_before": round(load, 2),
            }
            found["bench_s"] = round(time.perf_counter() - started_s, 1)
            print(name, json.dumps(brief(finite(found)), indent=1), flush=True)
            if not options.quick:
                results[name] = finite(found)
                results_path.parent.mkdir(exist_ok=True)
                results_path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                cores, load = found["machine"]["cores"], found["machine"]["load_before"]
                where = f"`python bench/async.py {name}`, {cores} cores, load before the run {load:g}."
                write_page(name, f"{part.tell(found)}\n\n{where}")
                if part.draw is not None:
                    (ROOT / "docs" / "img").mkdir(exist_ok=True)
                    (ROOT / "docs" / "img" / f"async-{name}.svg").write_text(
                        part.draw(found), encoding="utf-8"
                    )
            else:
                part.tell(found)
                if part.draw is not None:
                    part.draw(found)


if __name__ == "__main__":
    main()
