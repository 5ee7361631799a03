"""How often `rollbook diagnose` names the right cause first, how often it alarms on what is well, and how fast it is.

    python bench/diagnose.py                       # 20 seeds of everything, about three quarters of an hour on one core
    python bench/diagnose.py --seeds 3             # a glance
    python bench/diagnose.py --only healthy --seeds 300 --first-seed 5000
    python bench/diagnose.py --suites reported --seeds 25   # the logs of one generator alone
    python bench/diagnose.py --real 3              # and real runs: every fault of `rollbook drill` on three seeds
    python bench/diagnose.py --seeds 0 --real 20 --jobs 2 --results real.jsonl
                                                   # these alone, two at a time, about twenty minutes on two quiet
                                                   # cores; started again, it goes on where it was
    python bench/diagnose.py --runs FOLDER         # also runs of your own: FOLDER/<fault>-<anything>/

Logs come from five generators with different assumptions (`synthetic_runs.py`, `described_runs.py`, `unseen_runs.py`,
`reported_runs.py`, `oncall_runs.py`) in verl's JSON lines and console format and in our own names; `other_formats.py`
writes the third as TRL, slime, AReaL, W&B, TensorBoard and a Prometheus server would, and the fifth as SkyRL, slime,
AReaL and TRL. The fifth puts in stories, several of one fault. Prints a Markdown report; exits with 1 when a target is
missed: right cause first in 95 % of the faults, no alarm in 99 % of what is well.
"""

from __future__ import annotations

import argparse
import functools
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import described_runs
import oncall_runs
import other_formats
import reported_runs
import synthetic_runs
import unseen_runs
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

RIGHT_FIRST, NO_ALARM, MAX_S = 0.95, 0.99, 5.0
NO_ALARMS = ("well", "not_judged")
"""Verdicts that wake nobody: a run that logs little may be well without anybody being able to tell."""
STATES = sorted(synthetic_runs.STATES)
FAULTS = sorted({*synthetic_runs.FAULTS, *unseen_runs.FAULTS, *reported_runs.FAULTS})
EXPECTS = {name: (name,) for name in FAULTS} | oncall_runs.EXPECTS
"""What is wrong -> the verdicts that are right."""
NAMES = [
    *EXPECTS,
    "healthy",
    *STATES,
    *(n for n in {**unseen_runs.WELL, **reported_runs.WELL} if n not in ("healthy", *STATES)),
    *oncall_runs.WELL,
]

_OF_MECHANISM = frozenset({*synthetic_runs.FAULTS, "healthy", *synthetic_runs.STATES})
_OF_UNSEEN = frozenset({*unseen_runs.FAULTS, *unseen_runs.WELL})
_OF_REPORTED = frozenset({*reported_runs.FAULTS, *reported_runs.WELL})
_OF_ONCALL = frozenset({*oncall_runs.FAULTS, *oncall_runs.WELL})

Writer = Callable[[str, int, Path], Path | None]
"""Write one log; None where this generator has no such run, or nothing of the fault would be in the log."""


def _synthetic_verl(name: str, seed: int, folder: Path) -> Path:
    return synthetic_runs.write_jsonl(synthetic_runs.make(name, seed), folder / "exp.jsonl")


def _synthetic_console(name: str, seed: int, folder: Path) -> Path:
    return synthetic_runs.write_console(synthetic_runs.make(name, seed), folder / "run.log")


def _synthetic_own(name: str, seed: int, folder: Path) -> Path:
    world = synthetic_runs.make(name, seed, own_names=True)
    return synthetic_runs.write_jsonl(world, folder / "exp.jsonl", own_names=True)


def _described(name: str, seed: int, folder: Path) -> Path:
    return described_runs.write_jsonl(name, seed, folder / "exp.jsonl")


def _unseen_file(name: str, seed: int, folder: Path) -> Path | None:
    run = unseen_runs.make(name, seed)
    return None if run.only_words else unseen_runs.write_jsonl(run, folder / "exp.jsonl")


def _unseen_console(name: str, seed: int, folder: Path) -> Path:
    return unseen_runs.write_console(unseen_runs.make(name, seed), folder / "run.log")


def _reported_file(name: str, seed: int, folder: Path) -> Path | None:
    run = reported_runs.make(name, seed)
    return None if run.is_only_words else reported_runs.write_jsonl(run, folder / "exp.jsonl")


def _reported_console(name: str, seed: int, folder: Path) -> Path:
    return reported_runs.write_console(reported_runs.make(name, seed), folder / "run.log")


SUITES: dict[str, tuple[Writer, frozenset[str]]] = {
    # column -> how its logs are written, what it can put in
    "mechanism, verl file": (_synthetic_verl, _OF_MECHANISM),
    "mechanism, verl console": (_synthetic_console, _OF_MECHANISM),
    "mechanism, own names": (_synthetic_own, _OF_MECHANISM),
    "described, verl file": (_described, _OF_MECHANISM),
    "unseen, verl file": (_unseen_file, _OF_UNSEEN),
    "unseen, verl console": (_unseen_console, _OF_UNSEEN),
    "reported, verl file": (_reported_file, _OF_REPORTED),
    "reported, verl console": (_reported_console, _OF_REPORTED),
} | {
    f"oncall, {format}": (functools.partial(oncall_runs.write, format), _OF_ONCALL)
    for format in oncall_runs.TELLS
}


@dataclass
class Tally:
    """Verdicts by what was put in."""

    verdicts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, name: str, verdict: str) -> None:
        self.verdicts.setdefault(name, Counter())[verdict] += 1

    def right(self, name: str) -> tuple[int, int]:
        """(right verdicts, all): of what is well every verdict that is no alarm is right."""
        counts = self.verdicts.get(name, Counter())
        right = sum(counts[verdict] for verdict in EXPECTS.get(name, NO_ALARMS))
        return right, sum(counts.values())

    def total(self, *, faults: bool) -> tuple[int, int]:
        pairs = [self.right(name) for name in self.verdicts if (name in EXPECTS) == faults]
        return sum(r for r, _ in pairs), sum(n for _, n in pairs)


def judge(path: Path) -> str:
    """The verdict on one log."""
    return diagnose(load(str(path))).verdict


def run_suite(writer: Writer, names: list[str], seeds: range) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for seed in seeds:
                if (path := writer(name, seed, Path(folder))) is not None:
                    tally.add(name, judge(path))
    return tally


def run_other_format(format: str, names: list[str], seeds: range) -> Tally:
    tally = Tally()
    for name in names:
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                verdict = other_formats.verdict(format, name, seed, Path(folder))
            if verdict is not None:
                tally.add(name, verdict)
    return tally


def own_runs(folder: Path) -> Tally:
    """Run directories and logs named by what was put in: `missed_weight_sync-seed3/`, `healthy-seed1.log`."""
    tally = Tally()
    for path in sorted(folder.iterdir()):
        name = path.name.split("-")[0].split(".")[0]
        if name in NAMES:
            tally.add(name, judge(path))
    return tally


def table(tallies: dict[str, Tally]) -> Iterator[str]:
    """Right verdicts of what was put in, a column a suite."""
    yield "| put in | " + " | ".join(tallies) + " | what else was said |"
    yield "|---|" + "---|" * (len(tallies) + 1)
    for name in NAMES:
        cells, other = [], Counter[str]()
        for tally in tallies.values():
            right, total = tally.right(name)
            cells.append(f"{right}/{total}" if total else "")
            other.update(tally.verdicts.get(name, Counter()))
        for verdict in EXPECTS.get(name, ("well",)):
            other.pop(verdict, None)
        said = ", ".join(f"{verdict} {count}" for verdict, count in other.most_common())
        if any(cells):
            yield f"| {name} | " + " | ".join(cells) + f" | {said} |"


def seconds_for_ten_thousand_steps() -> Iterator[tuple[str, float, float]]:
    """(format, megabytes, CPU seconds of reading and judging) of a log of 10,000 steps, best of three."""
    with tempfile.TemporaryDirectory() as folder:
        for what, writer in (
            ("verl file", synthetic_runs.write_jsonl),
            ("verl console", synthetic_runs.write_console),
        ):
            path = writer(synthetic_runs.make("version_drift", 3, n=10_000), Path(folder) / "log")
            best = min(_timed(path) for _ in range(3))
            yield what, path.stat().st_size / 1e6, best


def _timed(path: Path) -> float:
    """CPU seconds: it runs on one thread, and waits for nothing."""
    start = time.process_time()
    judge(path)
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="names of what to put in; none: everything")
    parser.add_argument("--suites", default="", help="only suites whose name holds this; empty: all")
    parser.add_argument("--real", type=int, default=0, help="seeds of real runs, drilled and well")
    parser.add_argument("--jobs", type=int, default=1, help="real runs side by side")
    parser.add_argument(
        "--results", type=Path, help="JSON lines of real runs: what stands there is not run again"
    )
    parser.add_argument("--runs", type=Path, help="folder of real runs, named by what was put in")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    tallies = {
        name: run_suite(writer, [n for n in NAMES if n in known and (not args.only or n in args.only)], seeds)
        for name, (writer, known) in SUITES.items()
        if args.suites in name
    }
    wanted = [n for n in NAMES if not args.only or n in args.only]
    for format in other_formats.TELLS if not args.suites else ():
        tallies[f"unseen, {format}"] = run_other_format(format, wanted, seeds)
    if args.runs is not None:
        tallies["own runs"] = own_runs(args.runs)
    machine = platform.processor() or platform.machine()
    command = (
        f"python bench/diagnose.py --seeds {args.seeds} --first-seed {args.first_seed} --real {args.real}"
    )
    print(f"`{command}` on {machine}\n")
    if args.seeds:
        print("\n".join(table(tallies)) + "\n")
    ok = True
    if args.real:
        from drilled_runs import real_runs

        real_seeds = range(args.first_seed, args.first_seed + args.real)
        real = real_runs(real_seeds, args.only, results=args.results, jobs=args.jobs)
        print("\n".join(real.table()) + "\n")
        for (right, total), target, what in (
            (real.faults, RIGHT_FIRST, "real runs: right cause first"),
            (real.well, NO_ALARM, "real runs: no alarm"),
        ):
            if total:
                print(f"{what}: {right}/{total} = {right / total:.1%} (target {target:.0%})")
                ok &= right / total >= target
    for faults, target, what in ((True, RIGHT_FIRST, "right cause first"), (False, NO_ALARM, "no alarm")):
        right = sum(t.total(faults=faults)[0] for t in tallies.values())
        total = sum(t.total(faults=faults)[1] for t in tallies.values())
        if total:
            print(f"{what}: {right}/{total} = {right / total:.1%} (target {target:.0%})")
            ok &= right / total >= target
    for what, megabytes, seconds in seconds_for_ten_thousand_steps():
        print(f"10,000 steps, {what}, {megabytes:.0f} MB: {seconds:.2f} CPU s (target {MAX_S:.0f} s)")
        ok &= seconds < MAX_S
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
