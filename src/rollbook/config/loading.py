"""Reading and writing a config: one TOML file, one override form, every problem reported at once.

config = load_config(Path("run.toml"), ["buffer.max_staleness_steps=2"], RunConfig)
write_config(config, run_dir / "config.toml")       # every field; loads back to an equal object
"""

from __future__ import annotations

import enum
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollbook.errors import ConfigError, nearest_name

ConfigT = TypeVar("ConfigT", bound=BaseModel)
REMOVED = {
    "sync.token_file": (
        "every run draws a token of its own and tells it to its parts",
        "delete the line; a run that was begun with it can then be resumed and replayed",
    ),
    "algorithm.filter.max_failure_frac": (
        "failures count for the whole run, whatever a filter does",
        "write it as run.max_failure_frac",
    ),
}
"""Options that run directories of earlier versions still hold: why each is gone, and what to do."""


def load_config(path: Path | str, overrides: Sequence[str], cls: type[ConfigT]) -> ConfigT:
    """Read a TOML file, apply `--set` overrides in order, and check the whole.

    Args:
        path: a TOML file, UTF-8.
        overrides: "section.field=VALUE"; VALUE is TOML, or a bare string. "rewards.0.weight=2" reaches into
            an array of tables.
    Raises:
        ConfigError: the file cannot be read, is not TOML, or holds unknown keys or bad values; all problems
            are in the one error, each with its dotted name and value.
    """
    path = Path(path)
    data = _read_toml(path)
    for override in overrides:
        _apply(data, override)
    return validate(data, cls, origin=str(path))


def validate(data: Mapping[str, Any], cls: type[ConfigT], *, origin: str) -> ConfigT:
    """Build `cls` from plain values; a pydantic error becomes one ConfigError that lists every problem."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        problems = [_in_words(detail, data, cls) for detail in error.errors(include_url=False)]
    if len(problems) == 1:
        raise ConfigError(f"{problems[0][0]} (in {origin})", problems[0][1])
    lines = [f"  {what} ({remedy})" for what, remedy in problems]
    raise ConfigError(
        f"{len(problems)} problems in {origin}:\n" + "\n".join(lines), "correct each of these keys"
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        folder = path.parent if str(path.parent) else Path()
        nearby = sorted(p.name for p in folder.glob("*.toml")) if folder.is_dir() else []
        hint = (
            nearest_name(path.name, nearby)
            if nearby
            else f"{folder.absolute()} holds no .toml file: give the path of a run config (the folder examples has "
            "some, `rollbook plan -o run.toml` writes one) or of a run directory"
        )
        raise ConfigError(f"there is no config file {path}", hint) from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder, not a config file", f"did you mean {path / 'config.toml'}?"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "check the path and its permissions"
        ) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} in line {line}", "save the file as UTF-8"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}", "strings need quotes; see https://toml.io"
        ) from None


# -- overrides


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = [part.strip() for part in key.strip().split(".")]
    if not separator or not all(parts):
        raise ConfigError(
            f"--set {override!r} is not of the form a.b=VALUE", "for example --set trainer.lr=1e-4"
        )
    value = _parse_value(override, text.strip())
    table: Any = data
    for depth, part in enumerate(parts[:-1]):
        here = ".".join(parts[: depth + 1])
        table = table.setdefault(part, {}) if isinstance(table, dict) else _item(table, part, here, override)
        if not isinstance(table, (dict, list)):
            raise ConfigError(
                f"--set {override!r}: {here} is {_show(table)}, not a table", f"set {here} itself"
            )
    if isinstance(table, dict):
        table[parts[-1]] = value
    else:
        _item(table, parts[-1], ".".join(parts), override)
        table[int(parts[-1])] = value


def _item(array: list[Any], part: str, here: str, override: str) -> Any:
    if not part.isdigit() or int(part) >= len(array):
        raise ConfigError(
            f"--set {override!r}: {here} does not exist, the array has {len(array)} entries",
            f"use a position from 0 to {len(array) - 1}",
        )
    return array[int(part)]


def _parse_value(override: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(
                f"--set {override!r}: the value is not valid TOML: {error}",
                "mind the shell: quote the whole argument",
            ) from None
        return text  # a bare string: --set model.path=models/tiny


# -- problems in words


def _in_words(detail: Any, data: Mapping[str, Any], cls: type[BaseModel]) -> tuple[str, str]:
    """One pydantic error as (what, remedy)."""
    loc: tuple[int | str, ...] = detail["loc"]
    name, table = _locate(loc, data, cls)
    kind = detail["type"]
    context = detail.get("ctx") or {}
    if kind == "extra_forbidden" and name in REMOVED:
        reason, remedy = REMOVED[name]
        return f"{name} was an option of an earlier version: {reason}", remedy
    if kind == "extra_forbidden":
        known = _field_names(table) if table else []
        remedy = nearest_name(str(loc[-1]), known) if known else "remove it"
        return f"unknown key {name}", remedy
    if kind == "missing":
        return f"{name} is missing", f"add {loc[-1]} = ... to {_table_title(name)}"
    message = str(detail["msg"])
    if kind in ("value_error", "assertion_error"):
        message = str(context.get("error", message))
    if kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        message = "must be a table"
    what, _, rest = message.partition("\nhint: ")
    what = re.sub(r"^Input should be ", "must be ", what)
    if kind in ("value_error", "assertion_error") and (
        not name or isinstance(detail["input"], (Mapping, BaseModel))
    ):
        return _of_table(name, what, rest)  # a relation between fields: the message has their values
    return f"{name} is {_show(detail['input'])}: {what}", rest or _field_help(
        table, loc
    ) or "correct the value"


def _of_table(name: str, what: str, remedy: str) -> tuple[str, str]:
    """What a table's own validator says, as (what, remedy): it ends in the remedy after "; " or ": "."""
    if not remedy:
        separator = "; " if "; " in what else ": "
        what, _, remedy = what.rpartition(separator) if separator in what else (what, "", "")
    place = "" if not name or re.search(rf"\b{re.escape(name)}\b", what) else f"[{name}] "
    return place + what, remedy or "correct the values it names"


def _locate(
    loc: tuple[int | str, ...], data: Mapping[str, Any], cls: type[BaseModel]
) -> tuple[str, type[BaseModel] | None]:
    """Dotted name of an error's place, and the section class that holds its last part.

    Pydantic puts the names of union members and validators between the keys: a part that names neither a
    field nor anything in the data is left out.
    """
    names: list[str] = []
    owner: type[BaseModel] | None = cls
    annotation: Any = cls
    value: Any = data
    for depth, part in enumerate(loc):
        is_last = depth == len(loc) - 1
        sections = _sections(annotation)
        holder = next((s for s in sections if str(part) in s.model_fields), sections[0] if sections else None)
        in_data = (isinstance(value, Mapping) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        )
        is_field = holder is not None and str(part) in holder.model_fields
        if not in_data and not is_field and not (is_last and not sections):
            tagged = [s for s in sections if s.__name__ == str(part) or str(part) in _tags(s)]
            annotation = tagged[0] if tagged else annotation
            owner = tagged[0] if tagged else owner
            continue
        names.append(str(part))
        owner = holder
        annotation = (
            holder.model_fields[str(part)].annotation if holder and is_field else _item_type(annotation)
        )
        value = value[part] if in_data else None
    return ".".join(names), owner


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The section classes an annotation admits directly (through unions and Annotated, not containers)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [s for arg in typing.get_args(annotation) for s in _sections(arg)]
    if origin is typing.Annotated:
        return _sections(typing.get_args(annotation)[0])
    return []


def _item_type(annotation: Any) -> Any:
    """Element type of a list, tuple or dict annotation, through unions."""
    origin = typing.get_origin(annotation)
    arguments = [a for a in typing.get_args(annotation) if a is not Ellipsis]
    if origin is typing.Annotated:
        return _item_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return next((inner for a in arguments if (inner := _item_type(a)) is not None), None)
    return arguments[-1] if arguments and origin is not None else None


def _tags(section: type[BaseModel]) -> set[str]:
    """Literal values of a section's fields: what a discriminated union calls it."""
    return {
        str(tag)
        for field in section.model_fields.values()
        if typing.get_origin(field.annotation) is typing.Literal
        for tag in typing.get_args(field.annotation)
    }


def _field_names(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _field_help(section: type[BaseModel] | None, loc: tuple[int | str, ...]) -> str | None:
    """First sentence of the field's own documentation."""
    for part in reversed(loc):
        field = section.model_fields.get(str(part)) if section else None
        if field is not None and field.description:
            return f"{part}: " + " ".join(field.description.split()).split(". ")[0].rstrip(".")
    return None


def _table_title(name: str) -> str:
    table = name.rpartition(".")[0]
    return f"[{table}]" if table else "the top of the file"


def _show(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# -- writing


def write_config(config: BaseModel, path: Path) -> None:
    """Write every field as TOML; the file loads back to an equal object."""
    path.write_text(config_to_toml(config), encoding="utf-8")


def config_to_toml(config: BaseModel) -> str:
    """The resolved config as TOML text, every field, defaults included.

    TOML has no null: a field that is None stands as a comment, and must be None by default too.

    Raises:
        ConfigError: the text would not load back to an equal object (a None whose default is something else).
    """
    text = to_toml(config.model_dump(mode="python", by_alias=True))
    back = type(config).model_validate(tomllib.loads(text))
    if back != config:
        differs = [name for name in type(config).model_fields if getattr(back, name) != getattr(config, name)]
        raise ConfigError(
            f"config sections {', '.join(differs)} cannot be written as TOML and read back",
            "a field that is None must have None as its default",
        )
    return text


def to_toml(data: Mapping[str, Any]) -> str:
    """Plain values (tables, arrays, strings, numbers, enums, paths; None as a comment) as TOML text.

    >>> print(to_toml({"lr": 1e-4, "stop": None, "task": {"names": ["a", "b"]}}), end="")
    lr = 0.0001
    # stop is not set
    <BLANKLINE>
    [task]
    names = ["a", "b"]
    """
    lines: list[str] = []
    _write_table(lines, (), data)
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(lines: list[str], name: tuple[str, ...], table: Mapping[str, Any]) -> None:
    inner: list[tuple[str, Any]] = []
    for key, value in table.items():
        if value is None:
            lines.append(f"# {key} is not set")
        elif isinstance(value, Mapping) or _is_table_array(value):
            inner.append((str(key), value))
        else:
            lines.append(f"{_key(str(key))} = {_value(value)}")
    for key, value in inner:
        path = (*name, key)
        title = ".".join(_key(part) for part in path)
        for row in [value] if isinstance(value, Mapping) else value:
            lines.extend(["", f"[{title}]" if isinstance(value, Mapping) else f"[[{title}]]"])
            _write_table(lines, path, row)


def _is_table_array(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return _value(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (str, Path)):
        return _string(str(value))
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_key(str(k))} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
        )
    if isinstance(value, Iterable):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return str(value)  # dates and times print as TOML wants them


def _float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)
    return text if re.search(r"[.e]", text) else f"{text}.0"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
