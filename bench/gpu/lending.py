"""A trainer's GPU lent to generation while it waits: waits with it and waits without it, in turn, in one run.

    python bench/gpu/lending.py            # two GPUs: bound 0 within a minute, bound 1 likewise
    python bench/gpu/lending.py --tiny     # two cores, to see that it runs

The engine has the first GPU, the trainer the second. A step takes 32 groups of 8 and the engine has 128 slots, so that
half of the requests queue when nothing is lent. The run tries the lending itself (`controller/lending_trial.py`): its
verdict is the result, and the line of each kind of step says what it is made of. Predicted: a decode step of a model
this small costs its launches, whatever the batch, so a second engine with as many slots takes the queue at once, and
the wait of a step at bound 0 falls from about two waves to one (the tail stays): 0.55 to 0.7 of it, so 1.4 to 1.8
times the tokens/s. Both engines are threads of one process and share its interpreter: where Python's part of a decode
step is more than half of it, there is no gain, and the run says so. Bringing the engine up costs a re-sync by reference
and a probe, less than 0.2 s. At bound 1 the next step's generation runs beside the training, and the saving is smaller.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rollbook.config.loading import to_toml
from rollbook.controller.entry import start_run

NUM_STEPS = 11
"""The first wait is only measured; then comes the first comparison, of eight."""


def config(folder: Path, name: str, *, is_tiny: bool, bound: int) -> dict[str, Any]:
    """Untrained responses end with probability 1 / vocabulary at each token: long-tailed, all real decode work."""
    new = {
        "hidden_size": 64 if is_tiny else 1024,
        "num_layers": 2 if is_tiny else 12,
        "num_heads": 4 if is_tiny else 16,
        "intermediate_size": 128 if is_tiny else 2816,
        "initializer_range": 0.01,
        "max_position": 128 if is_tiny else 512,
        "alphabet": "abcdefghijklmnopqrstuvwxyz>",
        "vocab_size": 64 if is_tiny else 96,
    }
    limit = 48 if is_tiny else 320
    num_slots = 16 if is_tiny else 128
    devices = ("cpu", "cpu") if is_tiny else ("cuda:0", "cuda:1")
    return {
        "run": {
            "name": name,
            "dir": str(folder),
            "num_steps": NUM_STEPS,
            "groups_per_step": 4 if is_tiny else 32,
            "schedule": "separate_async",
        },
        "model": {"new": new, "device": devices[1], "dtype": "float32" if is_tiny else "bfloat16"},
        "data": {"sources": [{"task": "reverse", "num_prompts": 4096}]},
        "reward": {"terms": [{"function": "digits", "is_tested": False}]},
        "rollout": {
            "device": devices[0],
            "group_size": 8,
            "max_response_tokens": limit,
            "num_slots": num_slots,
            "kv_pool_tokens": num_slots * (limit + 64),
            "page_tokens": 32,
        },
        "buffer": {"max_staleness_steps": bound},
        "trainer": {"lr": 1e-7},
        "plan": {"is_on": False},
        "lending": {"is_on": True},
        "observe": {"terminal": "off", "trajectories_every_steps": 0},
        "checkpoint": {"save_model": False},
    }


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def tell(folder: Path) -> None:
    """The steps of each kind, and the run's own verdicts."""
    events = lines_of(folder, "events.jsonl")
    metrics = [line["data"] for line in lines_of(folder, "metrics.jsonl") if "timing_s/step" in line["data"]]
    lent = sorted({event["step"] for event in events if event["kind"] == "lent"})
    warm_up = {0, *lent[:1]}
    for kind, chosen in (
        ("lent", [i for i in lent if i not in warm_up]),
        ("idle", [i for i in range(len(metrics)) if i not in warm_up and i not in lent]),
    ):
        steps = [metrics[i] for i in chosen]
        if not steps:
            continue
        means = {
            name: round(sum(step.get(metric) or 0.0 for step in steps) / len(steps), 4)
            for name, metric in (
                ("step_s", "timing_s/step"),
                ("wait_s", "timing_s/gen"),
                ("tokens", "generated/num_tokens"),
                ("of_lent_engine", "lending/num_tokens"),
                ("cost_s", "lending/cost_s"),
                ("saved_s", "lending/saved_s"),
            )
        }
        gap = max(step.get("training/logprob_gap/max") or 0.0 for step in steps)
        print(f"  {kind}: {len(steps)} steps", json.dumps(means | {"gap_max": round(gap, 6)}), flush=True)
    for event in events:
        if event["kind"] in ("lending_judged", "lending_failed"):
            shown = {k: v for k, v in event.items() if k not in ("at_s", "mono_s", "kind", "process")}
            print(f"  {event['kind']}", json.dumps(shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    is_tiny = parser.parse_args().tiny
    with tempfile.TemporaryDirectory() as aside:
        for bound in (0, 1):
            made = config(Path(aside), f"bound-{bound}", is_tiny=is_tiny, bound=bound)
            path = Path(aside) / f"bound-{bound}.toml"
            path.write_text(to_toml(made), encoding="utf-8")
            began_s = time.perf_counter()
            folder = start_run(path, [])
            print(f"bound {bound}: {time.perf_counter() - began_s:.1f} s", flush=True)
            tell(folder)


if __name__ == "__main__":
    main()
