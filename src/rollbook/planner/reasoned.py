"""One step of the derivation: what it starts from, what it finds, and the sentence that defends it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoned:
    """One step of the derivation."""

    step: int
    title: str
    inputs: dict[str, object]
    outputs: dict[str, object]
    because: str

    def as_json(self) -> dict[str, object]:
        return {
            "step": self.step,
            "title": self.title,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "because": self.because,
        }
