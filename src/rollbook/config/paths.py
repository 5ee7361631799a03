"""Files and folders that a config names: found once, then known by their whole paths.

A name is looked for in the current folder and beside the config. What was found is written down whole, so that a
resume from any folder reads the same files; what was not found stays as it was given, for the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollbook.config.run_config import RunConfig
from rollbook.envs.rewards.functions import missing_module
from rollbook.modeling.config import is_local_path

PATHS = (
    "model.path",
    "model.tokenizer_path",
    "teacher.path",
    "teacher.tokenizer_path",
    "data.sources.*.path",
    "data.held_out.*.path",
    "plan.hardware",
    "teacher_endpoint.token_file",
    "eval.baseline.token_file",
    "reward.terms.*.judge.endpoint.token_file",
)
"""Fields that name something to read; `*` stands for every table of an array."""
WRITTEN = ("sync.shm_dir", "sync.disk_dir")
"""Fields that name a folder to write into, seen from the current folder as `run.dir` is."""
OR_HUB_NAMES = ("model.path", "model.tokenizer_path", "teacher.path", "teacher.tokenizer_path")
"""Those that may be a name on a hub instead."""


def with_whole_paths(config: RunConfig, folder: Path) -> RunConfig:
    """`config` with every file that is there, and every folder to write into, by its whole path.

    Args:
        folder: where the config lies.
    """
    data, given_data = config.model_dump(mode="python"), config.model_dump(mode="python")
    for _, table, key in _fields(data, WRITTEN):
        table[key] = str(Path(table[key]).expanduser().absolute())
    for _, table, key in _fields(data, PATHS):
        given = Path(table[key]).expanduser()
        found = next((place / given for place in (Path.cwd(), folder) if (place / given).exists()), None)
        if found is not None:
            table[key] = str(found.absolute())
    return config if data == given_data else RunConfig.model_validate(data)


def missing_files(config: RunConfig, folder: Path) -> Iterator[tuple[str, str]]:
    """(what, remedy) of every file and reward module that is in none of the places where it is looked for."""
    places = " and ".join(dict.fromkeys(str(place.resolve()) for place in (Path.cwd(), folder)))
    for name, table, key in _fields(config.model_dump(mode="python"), PATHS):
        value = str(table[key])
        may_be_hub_name = name in OR_HUB_NAMES and not is_local_path(value)
        if Path(value).expanduser().exists() or may_be_hub_name:
            continue
        seen_from = "" if Path(value).expanduser().is_absolute() else f" (seen from {places})"
        yield f"{name} {value!r} does not exist{seen_from}", _remedy(name)
    functions = dict.fromkeys(term.function for term in config.reward.terms if ":" in term.function)
    for function in functions:
        if error := missing_module(function, config.reward.search_path):
            yield error.what, error.remedy


def _remedy(name: str) -> str:
    if name.startswith("data."):
        return "give a path to a JSONL or Parquet file, or to a folder of them"
    if name.endswith("token_file"):
        return "name a file that holds the server's key alone, or leave it out"
    if name == "plan.hardware":
        return 'give a file of `rollbook calibrate`, or "" to measure before the first step'
    return "give a Hugging Face model folder or a hub name"


def _fields(data: dict[str, Any], patterns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(dotted name, the table that holds it, its key) of every path that is given."""
    for pattern in patterns:
        *tables, key = pattern.split(".")
        for name, table in _tables("", data, tables):
            if table.get(key):
                yield f"{name}{key}", table, key


def _tables(name: str, held: Any, parts: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if held is None:
        return
    if not parts:
        yield name, held
    elif parts[0] == "*":
        for idx, item in enumerate(held):
            yield from _tables(f"{name}{idx}.", item, parts[1:])
    else:
        yield from _tables(f"{name}{parts[0]}.", held[parts[0]], parts[1:])
