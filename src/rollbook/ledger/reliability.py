"""How far a prediction may be off: wider where nothing like it was measured.

`Assumptions.measured` lists, for each part of the ledger, what the published measurements that it was fitted on have
in common: devices, kinds of model, numbers, engines, modes. A prediction for something that is not in the list keeps
its value and gets a wider range and a note. The factors are what families of measurements that were left out of the fit
needed to fall into their ranges nine times of ten (bench/ledger_results.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.model import ModelSpec

Traits = Mapping[str, Iterable[str]]
"""Kind of trait ("device", "model", "dtype", "engine", "mode") -> what a prediction has of it."""

_WIDER = {"device": 1.5, "model": 1.25, "dtype": 1.25, "engine": 1.25, "mode": 1.25}
"""By which a range is wider where a trait of this kind was not measured."""
_MOST = 2.5
"""Times as wide as where everything was measured."""
_ASSUMED_MODEL = 2.0
_SCALE = 1.25
"""Where more GPUs work together, or sequences are longer, than in any measurement."""
_UNKNOWN_STORAGE = 2.0


def model_traits(model: ModelSpec) -> tuple[str, ...]:
    """What of a model's shape changes how its seconds come about.

    >>> from rollbook.ledger.model import load_model
    >>> model_traits(load_model("DeepSeek-V3"))
    ('experts', 'latent attention')
    """
    found = ["experts" if model.num_experts else "dense"]
    found += ["latent attention"] if model.kv_lora_rank else []
    found += ["windows"] if model.num_sliding_layers and model.sliding_window else []
    found += ["linear attention"] if model.num_linear_layers else []
    return tuple(found)


def widening(
    assumptions: Assumptions, part: str, traits: Traits, *, what: str
) -> tuple[float, tuple[str, ...]]:
    """The factor on the error of `part`, and a note for each trait that nobody measured.

    Args:
        part: a key of `Assumptions.measured`; a part that is not there was never measured at all.
        what: is predicted, for the notes.
    """
    measured = assumptions.measured.get(part, {})
    factor, notes = 1.0, []
    for kind, values in traits.items():
        unknown = [value for value in values if value not in measured.get(kind, ())]
        if unknown:
            factor *= _WIDER[kind]
            notes.append(
                f"no published measurement of {what} with {' and '.join(unknown)}: its range is {_WIDER[kind]:g} times "
                "as wide"
            )
    if factor > _MOST:
        notes.append(f"together these make the range of {what} {_MOST:g} times as wide, not {factor:.3g}")
    return min(factor, _MOST), tuple(notes)


def assumed_model_factor(model: ModelSpec) -> float:
    """On every error, where an architecture that is not known had to be assumed."""
    return _ASSUMED_MODEL if model.assumed else 1.0


def scale_factor(size: float, most_measured: float) -> float:
    """On an error, where more GPUs work together, or sequences are longer, than in any measurement."""
    return _SCALE if size > most_measured else 1.0


def checkpoint_error_frac(assumptions: Assumptions, *, is_storage_measured: bool) -> float:
    """Of a checkpoint's seconds: those of files, and more where nobody said how fast the storage is."""
    return assumptions.sync.error_frac["disk"] * (1.0 if is_storage_measured else _UNKNOWN_STORAGE)
