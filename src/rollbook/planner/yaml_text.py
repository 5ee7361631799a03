"""Plain values as YAML text: enough for the exporters, so that no YAML package is needed to plan."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./${}-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def to_yaml(data: Mapping[str, object], indent: int = 0) -> str:
    """Mappings, sequences and scalars in block style; a text of several lines becomes a literal block.

    >>> print(to_yaml({"name": "x", "gpus": [1, 2], "pool": {"size": 3}}), end="")
    name: x
    gpus:
      - 1
      - 2
    pool:
      size: 3
    """
    return "".join(_entry(key, value, indent) for key, value in data.items())


def _entry(key: str, value: object, indent: int) -> str:
    pad = "  " * indent
    if isinstance(value, Mapping):
        return (
            f"{pad}{_scalar(key)}:\n{to_yaml(value, indent + 1)}" if value else f"{pad}{_scalar(key)}: {{}}\n"
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            return f"{pad}{_scalar(key)}: []\n"
        return f"{pad}{_scalar(key)}:\n" + "".join(_item(item, indent + 1) for item in value)
    if isinstance(value, str) and "\n" in value:
        body = "".join(f"{pad}  {line}\n" if line else "\n" for line in value.rstrip("\n").split("\n"))
        return f"{pad}{_scalar(key)}: |\n{body}"
    return f"{pad}{_scalar(key)}: {_scalar(value)}\n"


def _item(value: object, indent: int) -> str:
    pad = "  " * indent
    if isinstance(value, Mapping):
        text = to_yaml(value, indent + 1)
        return f"{pad}- {text[len(pad) + 2 :]}"
    return f"{pad}- {_scalar(value)}\n"


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _WORDS
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    text = repr(value)
    # YAML 1.1 takes 1e-06 for a word: a number needs its point.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)
