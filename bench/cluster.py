"""A long run on Ray actors: does its memory grow? Object store, driver and actors, read while the run goes on.

    python bench/cluster.py --steps 1000        # one trainer, two replicas, separate_async, on one machine
    python bench/cluster.py --steps 60 --groups 4

Every step sends its batch to the trainer through Ray's object store (weights never pass through it). The table shows
its bytes and objects, and the resident memory of the driver and of the largest actor, in ten parts of the run.

Expected: the store's peak in the last tenth of the run is that of the first tenth, a few batches at most, whatever the
number of steps; resident memory of driver and actors grows by less than 20 % after the first tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

MIB = 1 << 20
USAGE = re.compile(r"Plasma memory usage ([0-9.]+) MiB, ([0-9]+) objects")
Sample = tuple[int, float, int, float, float]
"""(steps done, MiB in the store, objects in it, MiB resident of the driver, of the largest actor)."""


def sample(metrics: Path) -> Sample | None:
    """One reading; None while Ray is not up."""
    import ray

    if not ray.is_initialized() or not metrics.exists():
        return None
    from ray._private.internal_api import memory_summary

    try:
        found = USAGE.search(memory_summary(ray.get_runtime_context().gcs_address, stats_only=True))
    except Exception:  # it is being shut down
        return None
    if found is None:
        return None
    actors = [resident_mib(pid) for pid in children(os.getpid()) if is_actor(pid)]
    num_steps = metrics.read_bytes().count(b"\n")
    return num_steps, float(found[1]), int(found[2]), resident_mib(os.getpid()), max(actors, default=0.0)


def children(pid: int) -> list[int]:
    """All processes below `pid`."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text()
        except OSError:  # it ended
            continue
        parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(path.name))
    found, open_pids = [], [pid]
    while open_pids:
        below = parents.get(open_pids.pop(), [])
        found += below
        open_pids += below
    return found


def is_actor(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return name.startswith((b"ray::TrainerRank", b"ray::ReplicaActor"))


def resident_mib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"VmRSS:\s+([0-9]+) kB", text)
    return int(found[1]) / 1024 if found else 0.0


def settings(num_steps: int, num_groups: int, folder: str) -> list[str]:
    values: dict[str, Any] = {
        "run.dir": folder,
        "run.name": "long",
        "run.num_steps": num_steps,
        "run.groups_per_step": num_groups,
        "run.schedule": "separate_async",
        "buffer.max_staleness_steps": 1,
        "cluster.kind": "ray",
        "rollout.num_replicas": 2,
        "rollout.group_size": 8,
        "rollout.max_response_tokens": 8,
        "rollout.num_slots": 64,
        "rollout.num_threads": 1,
        "trainer.num_threads": 1,
        "model.new.hidden_size": 32,
        "model.new.num_layers": 1,
        "model.new.num_heads": 2,
        "model.new.intermediate_size": 64,
        "trainer.num_mini_batches": 1,
        "algorithm.filter.drop_flat": False,
        "warmup.num_updates": 0,
        "plan.is_on": False,
        "eval.num_prompts": 0,
        "checkpoint.every_steps": max(num_steps // 4, 1),
        "observe.terminal": "off",
    }
    return [f"{name}={_toml(value)}" for name, value in values.items()]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument(
        "--config", default=str(Path(__file__).resolve().parents[1] / "examples/addition.toml")
    )
    args = parser.parse_args()
    from rollbook.controller.entry import start_run

    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "long" / "metrics.jsonl"
        samples: list[Sample] = []
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.25):
                if (reading := sample(metrics)) is not None:
                    samples.append(reading)

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        began_s = time.perf_counter()
        start_run(Path(args.config), settings(args.steps, args.groups, folder))
        seconds = time.perf_counter() - began_s
        is_over.set()
        watching.join()
        events = [json.loads(line) for line in (Path(folder) / "long" / "events.jsonl").open()]
    num_lost = sum(event["kind"] == "quarantined" for event in events)
    print(f"{args.steps} steps of {args.groups} x 8 in {seconds:.0f} s; quarantined: {num_lost}")
    print(
        f"{'steps':>13s} {'store MiB, peak':>16s} {'objects, peak':>14s} {'driver MiB':>11s} {'actor MiB':>10s}"
    )
    for part in range(10):
        first, last = part * args.steps // 10, (part + 1) * args.steps // 10
        mine = [row for row in samples if first <= row[0] < max(last, first + 1)]
        if mine:
            peaks = [max(row[column] for row in mine) for column in range(1, 5)]
            print(
                f"{first:6d} - {last:4d} {peaks[0]:16.1f} {peaks[1]:14.0f} {peaks[2]:11.0f} {peaks[3]:10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
