"""A named fault, and the place it is injected into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollbook.controller.loop import Controller


@dataclass(frozen=True, slots=True)
class Site:
    """A built run, and the step from which the fault is there."""

    controller: Controller
    at_step: int

    @property
    def is_on(self) -> bool:
        return self.controller.is_stepping and self.controller.num_steps_done >= self.at_step

    @property
    def age(self) -> int:
        """Steps since the fault began; 0 before it."""
        return max(self.controller.num_steps_done - self.at_step, 0)


Inject = Callable[[Site], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of the registry."""

    name: str
    says: str
    """What breaks, in one line."""
    expects: tuple[str, ...]
    """Verdicts that are right: rules that name it, any of them first; "well" where nothing may be alarmed."""
    inject: Inject
    """Wraps parts of the built run. Before `at_step` the run must be healthy."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Config fields the fault needs, by dotted name: set for the drill, and said."""
    least: Mapping[str, int] = field(default_factory=dict)
    """Config fields that must be at least so large: raised where they are not."""
    least_sources: int = 1
    """Data sources the fault needs in the config; a drill cannot make them up."""
    notes: str = ""
    """What the diagnosis must say about the log itself."""
    ends_run: bool = False
    """The system is expected to stop the run."""
    takes_up_again: bool = False
    """The run stops at `at_step` and is resumed with the fault in."""


def wrap(part: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `around(method)` in the place of a part's method, on this object alone."""
    setattr(part, name, around(getattr(part, name)))
