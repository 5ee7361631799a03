"""Real runs for `bench/diagnose.py`: every fault of `rollbook drill` in the loop itself, and runs with nothing wrong.

The job is the one of the tests (`tests/drill_tiny.py`): ten thousand parameters, forty steps, a few seconds.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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


def real_runs(seeds: range, only: list[str]) -> Real:
    """Run every fault and every kind of well run, once a seed; or those of the names."""
    real = Real()
    for name, fault in FAULTS.items():
        if only and name not in only:
            continue
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                job = write_job(Path(folder), seed=seed)
                report = run_drill(fault, job, [], num_steps=NUM_STEPS, at_step=AT_STEP)
            real.verdicts.setdefault(name, Counter())[report.verdict] += 1
            real.controls[report.control_verdict] += 1
            if report.found_at_step is not None:
                real.after_steps.setdefault(name, []).append(report.found_at_step - AT_STEP)
    for name, overrides in WELL.items():
        if only and name.split(",")[0].split(":")[0] not in only:
            continue
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                run_dir = start_run(write_job(Path(folder), seed=seed), overrides)
                verdict = diagnose(load(str(run_dir))).verdict
            real.verdicts.setdefault(name, Counter())[verdict] += 1
    return real
