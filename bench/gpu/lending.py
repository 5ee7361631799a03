"""A trainer's GPU lent to generation while it waits: the same run with the device idle and lent.

    python bench/gpu/lending.py            # two GPUs, about two minutes
    python bench/gpu/lending.py --tiny     # two cores, to see that it runs

The engine has the first GPU, the trainer the second. A step takes 64 groups of 8 and the engine has 256 slots, so that
half of the requests queue when nothing is lent. Predicted: a decode step of a model this small costs its launches,
whatever the batch, so a second engine with as many slots takes the queue at once, and the wait of a step at bound 0
falls from about two waves to one (the tail stays): 0.55 to 0.7 of it. Bringing the engine up costs a re-sync by
reference and a probe, less than 0.2 s. At bound 1 generation of the next step runs beside the training, and the saving
is smaller.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rollbook.config.loading import to_toml
from rollbook.controller.entry import start_run

SKIP = 3
"""Steps before the figures: the first wait is only measured, and graphs are recorded."""


def config(folder: Path, name: str, *, is_tiny: bool, bound: int, is_lent: bool) -> dict[str, Any]:
    """Untrained responses end with probability 1 / vocabulary at each token: long-tailed, all real decode work."""
    new = {
        "hidden_size": 64 if is_tiny else 1024,
        "num_layers": 2 if is_tiny else 12,
        "num_heads": 4 if is_tiny else 16,
        "intermediate_size": 128 if is_tiny else 2816,
        "initializer_range": 0.01,
        "max_position": 128 if is_tiny else 2048,
        "alphabet": "abcdefghijklmnopqrstuvwxyz>",
        "vocab_size": 64 if is_tiny else 512,
    }
    limit = 96 if is_tiny else 1536
    num_slots = 16 if is_tiny else 256
    devices = ("cpu", "cpu") if is_tiny else ("cuda:0", "cuda:1")
    return {
        "run": {
            "name": name,
            "dir": str(folder),
            "num_steps": 5 if is_tiny else 10,
            "groups_per_step": 4 if is_tiny else 64,
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
            "kv_pool_tokens": num_slots * limit,
            "page_tokens": 32,
        },
        "buffer": {"max_staleness_steps": bound},
        "trainer": {"lr": 1e-7},
        "plan": {"is_on": False},
        "lending": {"is_on": True} if is_lent else {},
        "observe": {"terminal": "off", "trajectories_every_steps": 0},
        "checkpoint": {"save_model": False},
    }


def measure(folder: Path) -> dict[str, float]:
    lines = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line][SKIP:]

    def mean(name: str) -> float:
        return sum(step.get(name) or 0.0 for step in steps) / len(steps)

    return {
        "step_s": mean("timing_s/step"),
        "wait_s": mean("timing_s/gen"),
        "lent_s": mean("lending/lent_s"),
        "cost_s": mean("lending/cost_s"),
        "saved_s": mean("lending/saved_s"),
        "token_share": mean("lending/num_tokens") / mean("generated/num_tokens"),
        "gap_max": max(step.get("training/logprob_gap/max") or 0.0 for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    is_tiny = parser.parse_args().tiny
    with tempfile.TemporaryDirectory() as aside:
        for bound in (0, 1):
            for is_lent in (False, True):
                name = f"bound-{bound}-{'lent' if is_lent else 'idle'}"
                made = config(Path(aside), name, is_tiny=is_tiny, bound=bound, is_lent=is_lent)
                path = Path(aside) / f"{name}.toml"
                path.write_text(to_toml(made), encoding="utf-8")
                found = measure(start_run(path, []))
                print(name, json.dumps({key: round(value, 4) for key, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()
