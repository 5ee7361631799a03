"""Every option of a config is read by some run; where only some runs read it, another run that sets it says so."""

from __future__ import annotations

import ast
import itertools
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import rollbook
from rollbook.config.effects import OF_A_SOURCE, OF_A_TERM, ONLY_WITH, unused_options
from rollbook.config.run_config import RunConfig
from rollbook.errors import ConfigError
from tiny_run import TinyRun, tiny_config

SRC = Path(rollbook.__file__).parent
DECLARING = {SRC / "config" / "effects.py", *SRC.rglob("config.py")}


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Section classes that an annotation names, through unions and tuples."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from sections(argument)


def options(section: type[BaseModel] = RunConfig, title: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, field name) of every option that is no table."""
    for name, field in section.model_fields.items():
        inner = list(sections(field.annotation))
        for each in inner:
            yield from options(each, f"{title}{name}.")
        if not inner:
            yield f"{title}{name}", name


def read_names() -> set[str]:
    """Attributes that the package reads outside the declarations; within them, those that a property reads."""
    names: set[str] = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            if path not in DECLARING and is_read:
                names.add(node.attr)  # type: ignore[attr-defined]
            if path in DECLARING and isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                names |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    return names


def test_every_option_is_read_somewhere() -> None:
    read = read_names()
    assert [dotted for dotted, name in options() if name not in read] == []


def test_an_option_that_shares_its_name_is_read_where_its_own_section_is_known() -> None:
    """`read_names` takes any attribute of the name; this asks each of the sections that have one of it."""
    modules = []
    for path in SRC.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
        names = {n.id for n in nodes if isinstance(n, ast.Name)}
        if path not in DECLARING:
            modules.append((attributes, attributes | names))
    known_by: dict[tuple[str, type[BaseModel]], set[str]] = {}
    for name, section, table in owned():
        bases = {base.__name__ for base in section.__mro__[:-1] if base.__module__.endswith(".config")}
        known_by.setdefault((name, section), bases).add(table)
    names_of = Counter(name for name, _ in known_by)
    unread = [
        (section.__name__, name)
        for (name, section), words in known_by.items()
        if names_of[name] > 1 and not any(name in read and words & known for read, known in modules)
    ]
    assert unread == []


def owned(
    section: type[BaseModel] = RunConfig, table: str = ""
) -> Iterator[tuple[str, type[BaseModel], str]]:
    """(field name, section, name of its table) of every option that is no table."""
    for name, field in section.model_fields.items():
        inner = list(sections(field.annotation))
        for each in inner:
            yield from owned(each, name)
        if not inner:
            yield name, section, table


def test_the_table_names_options_and_tables_that_exist() -> None:
    known = {dotted for dotted, _ in options()}
    tables = {dotted.rpartition(".")[0] for dotted in known}
    assert [option for option in ONLY_WITH if option not in known | tables] == []
    for title, table in (("data.sources", OF_A_SOURCE), ("reward.terms", OF_A_TERM)):
        assert [name for name in table if f"{title}.{name}" not in known] == []


VALUES: dict[str, list[Any]] = {
    "rollout.pause_mode": ["abort"],
    "rollout.kv_policy": ["recompute"],
    "sync.commit_order": ["rolling"],
    "sync.disk_dir": ["/tmp"],
    "algorithm.truncation": ["last_value"],
    "algorithm.correction.reject.estimator": ["k1"],
    "rollout.vllm.load_format": ["dummy"],
}
"""What the options below are set to, where it does not follow from the default."""
WHERE: dict[str, dict[str, Any]] = {
    "algorithm.clip_eps_low": {"algorithm.loss": "reinforce"},
    "algorithm.clip_eps_high": {"algorithm.loss": "reinforce"},
    "sync.probe_prompt_tokens": {"sync.probe": False},
    "sync.probe_response_tokens": {"sync.probe": False},
    "sync.probe_factor": {"sync.probe": False},
    "buffer.max_refills_per_step": {"buffer.refill_failed": False},
    "buffer.on_starvation": {"buffer.refill_failed": False},
    "rollout.page_tokens": {"rollout.engine": "vllm", "rollout.page_tokens": 32},
    "buffer.max_running_groups": {"run.groups_per_step": 1},
    "memory.move_deadline_s": {"run.schedule": "separate_async"},
}
"""A run that does not read them, where the tiny synchronous run does."""


def other_values(section: type[BaseModel], name: str) -> list[Any]:
    """Values of an option beside its default, of its kind."""
    field = section.model_fields[name]
    default = field.get_default(call_default_factory=True)
    literals = [
        literal
        for part in (field.annotation, *typing.get_args(field.annotation))
        if typing.get_origin(part) is typing.Literal
        for literal in typing.get_args(part)
    ]
    if isinstance(default, bool):
        values: list[Any] = [not default]
    elif isinstance(default, int | float):
        values = [default + 1, default / 2, 4096]
    else:
        values = ["other", "main", 2]
    values = literals or values
    return [value for value in values if value != default]


def conditional() -> Iterator[tuple[str, type[BaseModel], str]]:
    for option in ONLY_WITH:
        section: type[BaseModel] = RunConfig
        *tables, name = option.split(".")
        for table in tables:
            (section,) = sections(section.model_fields[table].annotation)
        inner = list(sections(section.model_fields[name].annotation))
        if inner:
            yield from ((f"{option}.{each}", inner[0], each) for each in inner[0].model_fields)
        else:
            yield option, section, name


@pytest.mark.parametrize(
    ("option", "section", "name"),
    sorted(set(conditional()), key=lambda row: row[0]),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_that_does_not_read_an_option_says_so_or_refuses_it(
    option: str, section: type[BaseModel], name: str
) -> None:
    plain = tiny_config(**WHERE.get(option, {}))
    assert option not in {unused.option for unused in unused_options(plain)}, "not set, so nothing to say"
    said = []
    for value in VALUES.get(option) or other_values(section, name):
        try:
            config = tiny_config(**{**WHERE.get(option, {}), option: value})
            config.check()
        except (ConfigError, ValueError) as refused:
            if option.partition(".")[2] in str(refused):
                said.append(str(refused))
            continue
        (unused,) = [unused for unused in unused_options(config) if unused.option == option]
        assert unused.value == value and f"{option} is " in unused.says and ", which takes " in unused.says
        said.append(unused.says)
    assert said


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("rollout.pause_mode", {"run.schedule": "colocate_async", "rollout.pause_mode": "abort"}),
        ("rollout.kv_policy", {"run.schedule": "colocate_async", "rollout.kv_policy": "recompute"}),
        (
            "rollout.kv_policy",
            {
                "run.schedule": "separate_async",
                "buffer.max_staleness_steps": 1,
                "rollout.kv_policy": "recompute",
            },
        ),
        (
            "sync.commit_order",
            {
                "run.schedule": "separate_async",
                "buffer.max_staleness_steps": 1,
                "rollout.num_replicas": 2,
                "sync.commit_order": "rolling",
            },
        ),
        (
            "buffer.max_running_groups",
            {
                "run.schedule": "separate_async",
                "buffer.max_staleness_steps": 1,
                "buffer.max_running_groups": 6,
            },
        ),
    ],
)
def test_where_an_option_has_an_effect_nothing_is_said(option: str, config: dict[str, Any]) -> None:
    made = tiny_config(**config)
    made.check()
    assert option not in {unused.option for unused in unused_options(made)}


def test_a_config_shared_by_the_schedules_starts_with_each_of_them() -> None:
    """Every option that says how, at once: choosing the schedule stays one line."""
    how = {
        "rollout.pause_mode": "abort",
        "rollout.kv_policy": "recompute",
        "sync.commit_order": "rolling",
        "buffer.max_running_groups": 6,
        "rollout.num_replicas": 2,
    }
    said = {}
    for schedule in ("sync", "colocate_async", "separate_async"):
        config = tiny_config(**how, **{"run.schedule": schedule})
        config.check()
        said[schedule] = {unused.option for unused in unused_options(config)}
    assert said["sync"] == {
        "rollout.pause_mode",
        "rollout.kv_policy",
        "sync.commit_order",
        "buffer.max_running_groups",
    }
    assert said["colocate_async"] == {"rollout.kv_policy", "sync.commit_order"}
    assert said["separate_async"] == said["sync"], "at a bound of 0 it is synchronous"
    for one, other in itertools.combinations(said, 2):
        assert said[one] or said[other]


def test_weights_of_held_out_sources_are_never_drawn_by() -> None:
    made = {"task": "addition", "num_prompts": 8, "seed": 3, "weight": 2.0}
    said = {unused.option for unused in unused_options(tiny_config(**{"data.held_out": [made]}))}
    assert said == {"data.held_out.0.weight"}


def test_a_run_says_at_its_opening_what_has_no_effect(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=1, **{"rollout.kv_policy": "recompute", "data.sources.0.id_column": "key"})
    said = {event["option"]: event for event in run.events_of("no_effect")}
    assert set(said) == {"rollout.kv_policy", "data.sources.0.id_column"}
    assert said["rollout.kv_policy"]["value"] == "recompute"
    assert "responses under way while weights change" in said["rollout.kv_policy"]["says"]
    kinds = [event["kind"] for event in run.events]
    assert kinds.index("no_effect") < kinds.index("publication")
