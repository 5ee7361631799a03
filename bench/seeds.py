"""The demo on ten seeds: held-out exact match before and after GRPO, and the seconds of each part.

    python bench/seeds.py                 # seeds 0 to 9, one after the other: about twenty minutes on one core
    python bench/seeds.py --seeds 3 7

A seed decides the initial weights, the order of the data and every sample. The claim: above 0.9 on at least nine of
ten, from below 0.5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[1] / "examples" / "reverse.toml"


def run(seed: int, folder: Path) -> tuple[list[float], float]:
    """Held-out exact match at each evaluation, and the seconds of the whole command."""
    overrides = [f"run.dir={folder}", f"run.name=seed{seed}", f"run.seed={seed}", f"model.seed={seed}"]
    overrides += ["observe.terminal=off", "observe.trajectories_every_steps=0"]
    flags = [flag for override in overrides for flag in ("--set", override)]
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "rollbook.cli.main", "train", str(CONFIG), *flags],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - began_s
    lines = (folder / f"seed{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    readings = [json.loads(line)["data"].get("val/reverse/exact_match") for line in lines]
    return [reading for reading in readings if reading is not None], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(10)))
    args = parser.parse_args()
    print("| seed | before | after | seconds |\n|---|---|---|---|", flush=True)
    after = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            readings, seconds = run(seed, Path(folder))
            after.append(readings[-1])
            print(f"| {seed} | {readings[0]:.3f} | {readings[-1]:.3f} | {seconds:.0f} |", flush=True)
    print(f"\n{sum(a > 0.9 for a in after)} of {len(after)} above 0.9")


if __name__ == "__main__":
    main()
