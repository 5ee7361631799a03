"""The exception tree. Every error says what is wrong, with values, and what the reader can do.

RunError
├── ConfigError        before the run: a config value or a combination of them
├── PlanError          before the run: a plan that cannot be made
├── DataError          before the optimizer: a batch, a tensor, a prompt file
├── RolloutError       recorded on the trajectory while its siblings go on
│   ├── EngineError    the inference engine
│   │   └── EngineDownError  all of it: another replica may take the request
│   ├── EnvError       the environment or its sandbox
│   └── RewardError    the scorer
├── SyncError          the step is retried once, then the run stops, resumable
├── CheckpointError    likewise
├── TrainerDownError   a process of the trainer is gone: the run goes on from its last checkpoint
└── DeadlineError      a wait that passed its deadline; names what it waited for
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class RunError(Exception):
    """Base of the tree. Both strings sit in `args`, so it survives pickling between processes."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)

    @property
    def what(self) -> str:
        return str(self.args[0])

    @property
    def remedy(self) -> str:
        return str(self.args[1])

    def __str__(self) -> str:
        return f"{self.args[0]}\nhint: {self.args[1]}"


class ConfigError(RunError):
    """A config value, or a combination of values, that cannot run."""


class PlanError(RunError):
    """A plan that cannot be made from these inputs."""


class DataError(RunError):
    """Data that must not reach the optimizer."""


class RolloutError(RunError):
    """A trajectory that could not be produced or scored; its siblings go on."""


class EngineError(RolloutError):
    """The inference engine failed."""


class EngineDownError(EngineError):
    """The engine runs no more, or not yet: nothing is wrong with the request, another replica may take it."""


class EnvError(RolloutError):
    """The environment or its sandbox failed."""


class RewardError(RolloutError):
    """The scorer failed: the reward is unknown, not zero."""


class SyncError(RunError):
    """A weight publication failed; no replica serves under a version it does not hold."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read."""


class TrainerDownError(RunError):
    """A process of the trainer is gone, and with it what the others were computing."""


class DeadlineError(RunError):
    """A wait passed its deadline."""


def refuse(problems: Sequence[tuple[str, str]]) -> None:
    """Raise one ConfigError that lists every problem, (what, remedy) each; nothing where there is none."""
    if len(problems) == 1:
        raise ConfigError(*problems[0])
    if problems:
        lines = [f"  {what} ({remedy})" for what, remedy in problems]
        raise ConfigError(f"{len(problems)} problems:\n" + "\n".join(lines), "mend each of them")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Remedy text for an unknown name: the nearest known ones, or all of them when none is near.

    >>> nearest_name("grpoo", ["grpo", "ppo", "rloo"])
    "did you mean 'grpo' or 'rloo'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "choose one of: " + ", ".join(known)
