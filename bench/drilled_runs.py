"""Real runs for `bench/diagnose.py`: every fault of `rollbook drill` in the loop itself, and runs with nothing wrong.

The job is the one of the tests (`tests/drill_tiny.py`): ten thousand parameters, forty steps, a few seconds.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from drill_tiny import AT_STEP, NUM_STEPS, write_job
from rollbook.controller.entry import start_run
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose
from rollbook.drill.faults import FAULTS
from rollbook.drill.run import run_drill

WELL: dict[str, list[str]] = {
    "healthy": [],
    "healthy, separate_async": ["run.schedule=separate_async", "buffer.max_staleness_steps=1"],
    "healthy, colocate_async": ["run.schedule=colocate_async", "buffer.max_staleness_steps=2"],
    "plateau: learning rate too low": ["trainer.lr=1e-7"],
    "plateau: reward saturates": ["trainer.lr=3e-3"],
    "plateau: data exhausted": [
        "data.num_epochs=40",
        "data.sources.0.num_prompts=8",
        "data.sources.1.num_prompts=8",
    ],
}
"""What is well -> what its config overrides."""


@dataclass
class Real:
    """Verdicts on real runs."""

    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    after_steps: dict[str, list[int]] = field(default_factory=dict)
    """Fault -> steps from its beginning until the log named it."""
    controls: Counter[str] = field(default_factory=Counter)
    """Verdicts on the steps before the faults."""

    @property
    def faults(self) -> tuple[int, int]:
        right = sum(self.verdicts[name][rule] for name in self._put_in for rule in FAULTS[name].expects)
        return right, sum(self.verdicts[name].total() for name in self._put_in)

    @property
    def well(self) -> tuple[int, int]:
        """Whole runs with nothing wrong, and the steps before each fault."""
        counts = sum((self.verdicts[name] for name in self.verdicts if name in WELL), Counter(self.controls))
        return counts["well"], counts.total()

    @property
    def _put_in(self) -> list[str]:
        return [name for name in self.verdicts if name in FAULTS]

    def table(self) -> Iterator[str]:
        yield "| put into a real run | right rule first | steps until named, median | what else was said |"
        yield "|---|---|---|---|"
        for name, counts in self.verdicts.items():
            expects = FAULTS[name].expects if name in FAULTS else ("well",)
            right = sum(counts[rule] for rule in expects)
            other = ", ".join(f"{v} {c}" for v, c in counts.most_common() if v not in expects)
            after = self.after_steps.get(name)
            steps = f"{statistics.median(after):g}" if after else ""
            yield f"| {name} | {right}/{counts.total()} | {steps} | {other} |"
        alarms = ", ".join(f"{v} {c}" for v, c in self.controls.most_common() if v != "well")
        yield f"| the steps before each fault | {self.controls['well']}/{self.controls.total()} | | {alarms} |"


def real_runs(seeds: range, only: list[str], *, results: Path | None = None, jobs: int = 1) -> Real:
    """Run every fault and every kind of well run, once a seed; or those of the names.

    Args:
        results: a file of JSON lines, one a run; runs that it holds of this very code are not made again.
        jobs: runs side by side, each in a process of its own on one thread.
    """
    names = [n for n in (*FAULTS, *WELL) if not only or n in only or n.split(",")[0].split(":")[0] in only]
    code = code_digest()
    done = {} if results is None else _done(results, code)
    todo = [(name, seed) for seed in seeds for name in names if (name, seed) not in done]
    if todo:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            for row in pool.imap_unordered(_one, todo):
                done[row["name"], row["seed"]] = row
                print(f"  {len(done)}: {row['name']}, seed {row['seed']}: {row['verdict']}", file=sys.stderr)
                if results is not None:
                    with results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({**row, "code": code}) + "\n")
    real = Real()
    for name in names:
        for seed in seeds:
            row = done[name, seed]
            real.verdicts.setdefault(name, Counter())[row["verdict"]] += 1
            if row["control"] is not None:
                real.controls[row["control"]] += 1
            if row["after_steps"] is not None:
                real.after_steps.setdefault(name, []).append(row["after_steps"])
    return real


def code_digest() -> str:
    """Of every source file of the package: results of other code do not count."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _done(results: Path, code: str) -> dict[tuple[str, int], dict[str, Any]]:
    if not results.exists():
        return {}
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines() if line]
    return {(row["name"], row["seed"]): row for row in rows if row["code"] == code}


def _one(work: tuple[str, int]) -> dict[str, Any]:
    """One run and its verdict; an error of the drill itself is a verdict of its own."""
    name, seed = work
    row: dict[str, Any] = {"name": name, "seed": seed, "control": None, "after_steps": None}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder), seed=seed)
        try:
            if name in FAULTS:
                report = run_drill(FAULTS[name], job, [], num_steps=NUM_STEPS, at_step=AT_STEP)
                row |= {"verdict": report.verdict, "control": report.control_verdict}
                if report.found_at_step is not None:
                    row["after_steps"] = report.found_at_step - AT_STEP
            else:
                row["verdict"] = diagnose(load(str(start_run(job, WELL[name])))).verdict
        except Exception as error:  # one broken run is a wrong verdict, and the others go on
            row["verdict"] = f"error: {type(error).__name__}"
    return row | {"seconds": round(time.monotonic() - began_s, 1)}
