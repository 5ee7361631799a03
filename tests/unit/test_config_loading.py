"""Config loading: TOML, overrides, and every problem at once."""

from __future__ import annotations

import ast
import enum
import math
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, field_validator, model_validator

import rollbook.section
from rollbook.config.loading import REMOVED, config_to_toml, load_config, validate, write_config
from rollbook.config.run_config import RunConfig
from rollbook.errors import ConfigError
from rollbook.section import Section


class Mode(enum.StrEnum):
    SYNC = "sync"
    ASYNC = "separate_async"


class BufferSection(Section):
    groups_per_step: int = Field(8, ge=1)
    """Groups the trainer consumes in one step."""
    max_staleness_steps: int = Field(1, ge=0)
    """Versions the trainer may be ahead of the oldest token it trains on; 0 is on-policy."""


class RewardSection(Section):
    name: str
    weight: float = 1.0

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ("exact", "numeric"):
            raise ValueError(f"there is no reward {name!r}\nhint: use 'exact' or 'numeric'")
        return name


class DiskSection(Section):
    kind: Literal["disk"] = "disk"
    folder: Path = Path("weights")


class MemorySection(Section):
    kind: Literal["memory"] = "memory"
    num_buckets: int = 2


class Job(Section):
    seed: int = 0
    mode: Mode = Mode.SYNC
    name: str = "demo"
    note: str | None = None
    lr: float = 1e-3
    cap: float = math.inf
    sizes: tuple[int, ...] = (1, 2)
    buffer: BufferSection = BufferSection()
    rewards: list[RewardSection] = Field(default_factory=list)
    transport: Annotated[DiskSection | MemorySection, Field(discriminator="kind")] = MemorySection()
    weights: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _name_has_no_space(self) -> Job:
        if " " in self.name:
            raise ValueError("name must not hold a space")
        return self


def load(tmp_path: Path, text: str | bytes, overrides: list[str] | None = None) -> Job:
    path = tmp_path / "job.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config(path, overrides or [], Job)


def refuse(tmp_path: Path, text: str | bytes, overrides: list[str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, overrides)
    return caught.value


def test_file_then_overrides_in_order(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        "seed = 3\n[buffer]\ngroups_per_step = 16\n[[rewards]]\nname = 'exact'\n",
        ["buffer.max_staleness_steps=2", "buffer.max_staleness_steps = 4", "name=long-run", "lr=3e-4",
         "mode=separate_async", "sizes=[4, 5]", "rewards.0.weight=0.5", "weights.a=2"],
    )  # fmt: skip
    assert job.seed == 3
    assert job.buffer == BufferSection(groups_per_step=16, max_staleness_steps=4)
    assert (job.name, job.lr, job.mode, job.sizes) == ("long-run", 3e-4, Mode.ASYNC, (4, 5))
    assert job.rewards == [RewardSection(name="exact", weight=0.5)]
    assert job.weights == {"a": 2.0}


def test_unknown_key_names_its_place_and_the_nearest_name(tmp_path: Path) -> None:
    error = refuse(tmp_path, "[buffer]\nmax_stalenes_steps = 1\n")
    assert error.what == f"unknown key buffer.max_stalenes_steps (in {tmp_path / 'job.toml'})"
    assert error.remedy == "did you mean 'max_staleness_steps'?"


def test_unknown_key_in_an_override_is_refused_the_same_way(tmp_path: Path) -> None:
    error = refuse(tmp_path, "", ["bufer.groups_per_step=2"])
    assert "unknown key bufer" in error.what
    assert error.remedy == "did you mean 'buffer'?"


def test_unknown_key_inside_an_array_of_tables_and_a_union(tmp_path: Path) -> None:
    error = refuse(
        tmp_path,
        "[[rewards]]\nname = 'exact'\nweigth = 2.0\n[transport]\nkind = 'disk'\nfoldr = 'x'\n",
    )
    assert "unknown key rewards.0.weigth (did you mean 'weight'?)" in error.what
    assert "unknown key transport.foldr (did you mean 'folder'?)" in error.what


def test_every_problem_is_reported_at_once_with_its_value(tmp_path: Path) -> None:
    error = refuse(
        tmp_path,
        "seed = 'x'\nmode = 'asink'\n[buffer]\ngroups_per_step = 0\n"
        "[[rewards]]\nweight = 1\n[[rewards]]\nname = 'f1'\n",
    )
    assert error.what.startswith("5 problems in ")
    for line in (
        'seed is "x": must be a valid integer',
        "mode is \"asink\": must be 'sync' or 'separate_async'",
        "buffer.groups_per_step is 0: must be greater than or equal to 1 "
        "(groups_per_step: Groups the trainer consumes in one step)",
        "rewards.0.name is missing (add name = ... to [rewards.0])",
        "rewards.1.name is \"f1\": there is no reward 'f1' (use 'exact' or 'numeric')",
    ):
        assert line in error.what


def test_a_relation_between_fields_is_reported_without_a_place(tmp_path: Path) -> None:
    assert refuse(tmp_path, "name = 'a b'").what.startswith("name must not hold a space")


def test_a_value_where_a_table_belongs(tmp_path: Path) -> None:
    assert "buffer is 3: must be a table" in refuse(tmp_path, "buffer = 3").what


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    error = refuse(tmp_path, b"seed = 1\nname = '\xe9'\n")
    assert "is not UTF-8: byte 0xe9 in line 2" in error.what


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbfseed = 1\n").seed == 1


def test_bad_toml_names_the_line(tmp_path: Path) -> None:
    assert "line 2" in refuse(tmp_path, "seed = 1\nname = demo\n").what


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "arithmetic.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "aritmetic.toml", [], Job)
    assert caught.value.remedy == "did you mean 'arithmetic.toml'?"


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path, [], Job)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "not of the form"),
        ("=3", "not of the form"),
        ("a..b=3", "not of the form"),
        ("sizes=[1, 2", "not valid TOML"),
        ("seed.x=3", "seed is 1, not a table"),
        ("rewards.1.weight=3", "the array has 1 entries"),
        ("rewards.x=3", "the array has 1 entries"),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, message: str) -> None:
    error = refuse(tmp_path, "seed = 1\n[[rewards]]\nname = 'exact'\n", [override])
    assert message in error.what


def test_resolved_config_holds_every_field_and_loads_back(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        'name = "tab\\tquote\\"\\u007f"\n[[rewards]]\nname = "exact"\n[[rewards]]\nname = "numeric"\nweight = 2\n'
        '[weights]\n"odd key.x" = 1.5\n[transport]\nkind = "disk"\nfolder = "/a b"\n',
    )
    write_config(job, tmp_path / "resolved.toml")
    assert load_config(tmp_path / "resolved.toml", [], Job) == job
    text = (tmp_path / "resolved.toml").read_text()
    for line in (
        "cap = inf",
        "# note is not set",
        'mode = "sync"',
        "lr = 0.001",
        "sizes = [1, 2]",
        "[buffer]",
    ):
        assert line in text.splitlines()


def test_a_none_that_toml_cannot_say_is_refused() -> None:
    class Odd(Section):
        limit: int | None = 3

    with pytest.raises(ConfigError, match="limit cannot be written"):
        config_to_toml(Odd(limit=None))


def test_a_contradiction_within_a_table_gives_values_and_remedy_not_the_table() -> None:
    """Its validator has the whole table as input; only the values it names belong into the message."""
    data = {
        "run": {"num_steps": 1, "groups_per_step": 1},
        "model": {"new": {"num_heads": 3, "num_kv_heads": 2, "hidden_size": 48}},
        "data": {"sources": [{"task": "addition", "path": "x.jsonl"}]},
        "rollout": {"kv_pool_tokens": 4, "max_response_tokens": 77},
        "algorithm": {"kl": {"placement": "loss"}},
    }
    with pytest.raises(ConfigError) as refused:
        validate(data, RunConfig, origin="run.toml")
    lines = refused.value.what.splitlines()
    assert lines[0].endswith("problems in run.toml:")
    assert (
        "  rollout.kv_pool_tokens is 4, less than one page of 32 tokens (raise it, or lower rollout.page_tokens)"
        in lines
    )
    assert "  [model.new] num_heads is 3 and num_kv_heads 2 (use a divisor of num_heads)" in lines
    assert (
        "  [data.sources.0] a source names task and path (give exactly one of task, reasoning_gym, path and hub)"
        in lines
    )
    assert "77" not in refused.value.what
    with pytest.raises(ConfigError) as alone:
        validate(
            data | {"model": {"path": "m"}, "data": {"sources": [{"task": "addition"}]}, "algorithm": {}},
            RunConfig,
            origin="run.toml",
        )
    assert alone.value.what == "rollout.kv_pool_tokens is 4, less than one page of 32 tokens (in run.toml)"
    assert alone.value.remedy == "raise it, or lower rollout.page_tokens"


def test_every_validator_of_a_section_ends_in_its_remedy() -> None:
    """After "; " or ": ", so that the message can be split into what is wrong and what to do."""
    found = 0
    for path in sorted((Path(rollbook.section.__file__).parent).glob("*/config.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and ast.unparse(node.exc.func) == "ValueError"
            ):
                text = "".join(
                    part.value
                    for part in ast.walk(node.exc.args[0])
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
                found += 1
                assert "; " in text or ": " in text or "\nhint: " in text, f"{path}:{node.lineno} {text!r}"
    assert found > 25


def _nested(option: str) -> dict[str, object]:
    first, _, rest = option.partition(".")
    return {first: _nested(rest) if rest else "x"}


@pytest.mark.parametrize("option", REMOVED)
def test_an_option_of_an_earlier_version_says_why_it_is_gone_and_what_to_do(option: str) -> None:
    """As a resume of a run that was begun then finds it."""
    with pytest.raises(ConfigError) as raised:
        validate(_nested(option), RunConfig, origin="config.toml")
    assert f"{option} was an option of an earlier version: " in raised.value.what
    assert "unknown key" not in raised.value.what


def test_no_option_that_is_there_is_called_removed() -> None:
    for option in REMOVED:
        section: type[BaseModel] = RunConfig
        *tables, name = option.split(".")
        for table in tables:
            annotation = section.model_fields[table].annotation
            assert isinstance(annotation, type)
            section = annotation
        assert name not in section.model_fields
