"""Read a published case whatever names, units and layouts its collector chose: one set of names, plain numbers.

`as_read` gives the same case in the words that `ledger_cases.py` knows. Fields in those words stay as they are. Others
are known by the words of their names; numbers are read out of texts ("about 8k tokens"), seconds out of any unit; and
what the fields leave out (batch, lengths, GPUs, degrees) is looked for in the notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ledger_measured import measured_as_known
from ledger_names import FIELDS, Names, flat
from ledger_numbers import figure
from ledger_prose import filled

Case = dict[str, Any]
Part = dict[str, Any]

_TEXTS = frozenset(
    [
        "model",
        "gpu",
        "framework",
        "train_backend",
        "engine",
        "gpu_split",
        "mode",
        "precision_gen",
        "precision_train",
        "enforce_eager",
        "on_off_policy",
        "precision",
        "kv_cache",
        "recompute",
        "train_layout",
        "rollout_layout",
        "rollout_precision",
        "method",
        "network",
        "rollout",
    ]
)
_MORE_NUMBERS = frozenset(
    [
        "train_batch_size_prompts",
        "num_prompts",
        "rollout_n",
        "group_size",
        "sequences_per_step",
        "rollout_batch_G_GBS",
        "prompt_length_mean",
        "response_length_mean",
        "mean_sequence_tokens",
        "mean_total_length",
        "max_num_seqs",
        "max_running_requests",
        "nodes_decode",
        "seq_length",
        "mini_batch",
    ]
)


def _renamed(config: Part, fields: dict[str, Names]) -> Part:
    """The fields under our names, where none of the known names is there already."""
    found = dict(config)
    for name, (known, pattern) in fields.items():
        if any(found.get(key) is not None for key in known):
            continue
        # A limit only where nothing says how many there are.
        for key, value in sorted(config.items(), key=lambda item: flat(item[0]).startswith("max")):
            if value is None or (name in _TEXTS and not isinstance(value, str)):
                continue
            if re.fullmatch(pattern, flat(key)):
                found[name] = value
                break
    return found


def _plain(config: Part, fields: dict[str, Names]) -> Part:
    """Numbers where a text begins with one."""
    numeric = (set(fields) - _TEXTS) | _MORE_NUMBERS
    found = dict(config)
    for key, value in config.items():
        if (
            key in numeric
            and isinstance(value, str)
            and not re.match(r"\s*[\d.]+\s*(?:-|to)\s*[\d.]+\s*$", value)
        ):
            number = figure(value)
            if number is not None:
                found[key] = int(number) if number.is_integer() else number
    return found


def as_read(case: Case) -> Case:
    """The case in the adapters' names and units."""
    category = case["category"]
    fields = FIELDS.get(category)
    if fields is None:
        return case
    config, measured = case.get("config") or {}, case.get("measured") or {}
    notes = case.get("notes") or ""
    texts = [notes if isinstance(notes, str) else " ".join(str(one) for one in notes)]
    texts += [
        str(value)
        for key, value in config.items()
        if flat(key) in ("workload", "setup", "description", "details", "note", "batch")
    ]
    config = _plain(_renamed(config, fields), fields)
    measured = measured_as_known(measured, category)
    return {**case, "config": filled(config, measured, ". ".join(texts), category), "measured": measured}


def changes(case: Case) -> Iterator[str]:
    """What reading changed, for people: "gpus: None -> 32"."""
    read = as_read(case)
    for part in ("config", "measured"):
        for key, value in read[part].items():
            if (case.get(part) or {}).get(key) != value:
                yield f"{key}: {(case.get(part) or {}).get(key)!r} -> {value!r}"
