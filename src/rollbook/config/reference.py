"""Every key of a run's config, its default and its meaning, as a page: `python -m rollbook.config.reference`."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from rollbook.config.run_config import RunConfig
from rollbook.section import Section

HEAD = """# The keys of a config

Printed by `python -m rollbook.config.reference` from the sections' `config.py`; edit there, not here.

A config is one TOML file. `rollbook train` writes the resolved one, defaults included, into the run directory; a
run started from that is the same run. `--set trainer.lr=1e-6` overrides one key, `--set data.sources.0.path=my.jsonl`
one of a list's first element. A key that does not exist, or that would have no effect beside the others, is refused
by name.
"""

BOUNDS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}


def to_markdown() -> str:
    """The text of `docs/config.md`."""
    return "\n".join([HEAD, *_tables("", RunConfig, {})])


def _tables(path: str, section: type[Section], seen: dict[type[Section], str]) -> Iterator[str]:
    """The table of a section's own keys, then those of the sections in it.

    Args:
        seen: where each section's keys stand; one that occurs again is named by that.
    """
    seen[section] = path
    keys, inner = [], []
    for name, field in section.model_fields.items():
        found = _section_in(field.annotation)
        if found is None:
            keys.append(f"| `{name}` | {_kind(field)} | {_default(field)} | {_cell(field.description)} |")
            continue
        is_list = typing.get_origin(field.annotation) is tuple
        inner.append((f"{path}.{name}".lstrip("."), found, is_list, field))
    if keys:
        yield from ("| key | values | default | meaning |", "|---|---|---|---|", *keys, "")
    for inner_path, found, is_list, field in inner:
        title = f"[[{inner_path}]]" if is_list else f"[{inner_path}]"
        yield from (f"## `{title}`", "", _cell(field.description), "")
        if found in seen:
            yield from (f"Its keys are those of `{seen[found]}`.", "")
        else:
            yield from _tables(inner_path, found, seen)


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds: alone, or none, or several."""
    kinds = [annotation, *typing.get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _kind(field: FieldInfo) -> str:
    """What values there are: the choices, or a type with its bounds."""
    kind = _words(field.annotation)
    bounds = [
        f"{sign} {getattr(bound, attribute):g}"
        for bound in field.metadata
        for cls, (sign, attribute) in BOUNDS.items()
        if isinstance(bound, cls)
    ]
    return ", ".join([kind, *bounds])


def _words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, UnionType):
        return " or ".join(_words(each) for each in arguments if each is not type(None))
    if origin is tuple:
        return f"list of {_words(arguments[0])}"
    if origin is dict:
        return "table"
    return {str: "text", int: "whole number", float: "number", bool: "true, false"}[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", (), {}):
        return "–"
    return f"`{_cell(json.dumps(value))}`"


def _cell(text: str | None) -> str:
    """One line, with nothing that ends a cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(to_markdown(), end="")
