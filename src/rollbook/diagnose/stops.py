"""Why a run stopped, in its own words: the last error after the last step, and which rule those words belong to.

Our run directories say it in `step_failed` and `run_failed`; console logs in a traceback at their end, or in the words
that the kernel, Ray, NCCL or the shell write of a dying process (`readers/endings.py`). An error that a run got over
(more steps came after it, or it was taken up again) is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollbook.diagnose.finding import Evidence
from rollbook.diagnose.view import View, once

_TOLD_BY: tuple[tuple[str, str], ...] = (
    # rule, what its words look like; the first that fits
    ("oom_in_sync", r"was not published: .*out of memory"),
    ("late_oom_with_length", r"out of memory|OutOfMemoryError|ALLOC_FAILED"),
    (
        "collective_hang",
        r"did not answer to \w+ of version|did not export .{0,60}within|[Cc]ollective.{0,40}time",
    ),
    ("engine_mismatch", r"no replica gives the trainer's logprobs"),
    ("refused_publication", r"was not published|digest|was to be published|is not the manifest's"),
    ("dead_scorer", r"trajectories failed, \d+ of them as reward"),
    ("dead_sandbox_pool", r"trajectories failed, \d+ of them as (?:environment|sandbox_lost)"),
    ("filter_starvation", r"groups and lost \d+ [^:]*: \d+ flat|num_gen_batches=\d+ >= max_num_gen_batches"),
    (
        "buffer_never_fills",
        r"waited [\d.e+]+ s for its groups|trajectories failed, \d+ of them as timeout"
        r"|(?i:(?=.*(?:time[d ]?[- ]?out|deadline))(?=.*\bwait)(?!.*(?:process group|\brank|nccl|collective))"
        r".*\b\d+ (?:\w+ )?(?:rollout|sample|group|trajector|episode|prompt|response)\w*)",
    ),
    ("mismatch_to_nan", r"not finite|\bNaN\b|\bnan\b"),
)


CAUSES: dict[str, tuple[str, str]] = {
    # cause, as `readers/endings.py` names it: (what it was, what to do)
    "host_memory": (
        "host memory ran out, and a process was killed",
        "find who holds the host's memory (replay data, offloaded optimizer, object store, sandboxes, data workers) "
        "and lower it, or take a host with more; then resume. A growth over the run is in perf/cpu_memory_used_gb",
    ),
    "device_memory": (
        "device memory ran out",
        "lower the tokens of a micro batch or the KV pool's share, then resume",
    ),
    "collective": (
        "a collective timed out",
        "dump the stacks of all ranks: the one that is elsewhere is the cause",
    ),
    "device": (
        "the GPU refused an operation",
        "run the failing step again with CUDA_LAUNCH_BLOCKING=1 (a device-side assert is usually an index out of "
        "range: token ids against the vocabulary), and look for Xid lines in the host's kernel log",
    ),
    "network": (
        "a collective was aborted",
        "find the rank that failed first (the others only follow), then its host's kernel and network logs",
    ),
    "shared_memory": (
        "bus error",
        "shared memory is full: enlarge /dev/shm (docker --shm-size), then resume",
    ),
    "crash": (
        "a process crashed in native code",
        "look at the core dump or run with PYTHONFAULTHANDLER=1; suspect the library that was updated last",
    ),
    "scheduler": ("the scheduler ended the job", "ask for more time or resume from the newest checkpoint"),
    "killed": (
        "a process was killed from outside",
        "look in the kernel log (dmesg) for the out-of-memory killer, else in the scheduler's log for a limit",
    ),
    "disk": (
        "the disk is full",
        "free space where checkpoints, caches and temporary files are written (df -h, quota), keep fewer checkpoints, "
        "then resume",
    ),
    "library": (
        "a library is missing or does not fit",
        "install the version that the error names into this environment, on every node; an undefined symbol means that "
        "it was built for another torch",
    ),
    "port": (
        "a port is in use",
        "end the process that holds it, often an earlier run's, or choose another port",
    ),
    "access": (
        "access was refused",
        "log in or set the token in the environment of every node (HF_TOKEN, WANDB_API_KEY), and accept a gated "
        "model's terms; of a path look at its owner",
    ),
    "file": ("a file is missing", "check the path on the node that reads it"),
    "interrupted": (
        "somebody interrupted it",
        "nothing is wrong in the log: ask who did, and what they had seen",
    ),
    "process_gone": (
        "a worker process has gone",
        "its own last lines say why: look in the worker's log of that pid, and in the kernel log for the "
        "out-of-memory killer",
    ),
}


_OF_A_HANG = re.compile(
    r"nccl|hccl|gloo|rccl|collective|process ?group|\brank|barrier|broadcast|all_?reduce|all_?gather|time[d ]?[- ]?out"
    r"|watchdog|heartbeat|DistBackend|DistStore|DistNetwork|Died|Unavailable|Crashed|ChildFailed|SIG[A-Z]+|terminat|abort"
    r"|killed|cancel|interrupt|connection|broken ?pipe|EOFError|shut",
    re.IGNORECASE,
)
"""What processes say that wait for another one, or for whom others waited."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The error that ended a run."""

    step: int
    """The step that was under way."""
    words: str
    remedy: str
    told_by: str | None
    """The rule that its words belong to; None: no rule of its own."""
    cause: str | None = None
    """A key of `CAUSES`, where no error was raised that says more."""

    @property
    def is_of_its_own(self) -> bool:
        """Whether an error was raised that no wait for another process ends in: who waits for the one that raised it
        times out later."""
        return self.told_by is None and _OF_A_HANG.search(self.words) is None

    def evidence(self) -> Evidence:
        return Evidence(metric="log", step=self.step, says=f"the run stopped: {self.words}")

    def evidence_with(self, view: View, kind: str) -> tuple[Evidence, ...]:
        """The stop, and the last two events of the kind that led to it."""
        led = view.events(kind)[-2:]
        steps = [self.step if event.step is None else event.step for event in led]
        return (
            self.evidence(),
            *(Evidence(metric=kind, step=step, says=event.text) for step, event in zip(steps, led)),
        )


@once("stop")
def stop(view: View) -> Stop | None:
    """The error that ended the run, if one did and nothing came after it."""
    last_step = int(view.run.steps[-1])
    named: Stop | None = None
    is_interrupted = False
    for event in view.run.events:
        if event.kind in ("run_resumed", "run_started", "interrupted"):
            named, is_interrupted = None, event.kind == "interrupted"
        if is_interrupted:
            continue  # what fails then was stopped by somebody
        if event.kind not in ("step_failed", "run_failed") or not event.text:
            continue
        step = last_step if event.step is None else event.step
        if step < last_step:
            continue
        cause = event.fields.get("cause")
        remedy = str(event.fields.get("remedy") or (CAUSES[cause][1] if cause else ""))
        if named is not None and event.kind == "run_failed" and event.step is None:
            step = named.step  # the step that failed has said which it was
        told_by = None if cause == "host_memory" else _rule_of(event.text)
        named = Stop(step, event.text, remedy, told_by, cause)
    return named


def note(view: View) -> str:
    """That somebody stopped the run, where it was not taken up again; empty where nobody did."""
    kinds = ("run_resumed", "run_started", "interrupted")
    last = next((event for event in reversed(view.run.events) if event.kind in kinds), None)
    if last is None or last.kind != "interrupted":
        return ""
    step = int(view.run.steps[-1]) if last.step is None else last.step
    return f"somebody stopped the run (Ctrl-C or a signal) in or after step {step}: {last.text}"


def stopped_by(view: View, rule: str) -> Stop | None:
    """The stop, if its words belong to this rule."""
    found = stop(view)
    return found if found is not None and found.told_by == rule else None


def _rule_of(words: str) -> str | None:
    return next((rule for rule, pattern in _TOLD_BY if re.search(pattern, words)), None)
