"""One line of the books: seconds, bytes and FLOPs of a stage, with formula and source."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A predicted stage."""

    name: str
    """Span name of the stage, such as "rollout" or "train"."""
    seconds: float
    seconds_low: float
    seconds_high: float
    """Interval that should hold the measurement in nine cases of ten."""
    bytes: float = 0.0
    """Bytes that the stage must move; 0 where the model does not count them."""
    flops: float = 0.0
    """Model FLOPs, without recomputation."""
    formula: str
    source: str

    def scaled(self, factor: float) -> Entry:
        """Every second `factor` times as long."""
        return replace(
            self,
            seconds=self.seconds * factor,
            seconds_low=self.seconds_low * factor,
            seconds_high=self.seconds_high * factor,
        )

    def at(self, seconds: float) -> Entry:
        """The same stage with other work, and an interval as wide."""
        return self.scaled(seconds / self.seconds) if self.seconds > 0 else replace(self, seconds=seconds)

    def as_json(self) -> dict[str, object]:
        """For `plan.json`."""
        return asdict(self)


def entry(
    name: str,
    seconds: float,
    *,
    error_frac: float,
    formula: str,
    source: str,
    bytes: float = 0.0,
    flops: float = 0.0,
) -> Entry:
    """An `Entry` whose interval is a factor of 1 + `error_frac` both ways."""
    return Entry(
        name=name,
        seconds=seconds,
        seconds_low=seconds / (1 + error_frac),
        seconds_high=seconds * (1 + error_frac),
        bytes=bytes,
        flops=flops,
        formula=formula,
        source=source,
    )
