"""The `[data]` and `[reward]` sections."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from rollbook.envs.rewards.result import Isolation
from rollbook.section import Section

JUDGE = "judge"
"""Reward function that is a model behind a server."""


def _require_group(name: str, pattern: str, sought: str) -> None:
    """
    Raises:
        ValueError: not a regular expression, or without a group around what is sought.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{name} is no regular expression ({error}); mend it") from None
    if groups < 1:
        raise ValueError(f"{name} has no group; put the {sought} in parentheses")


class SourceConfig(Section):
    """One source of prompts: a built-in task, a reasoning-gym task, a file or folder, or a hub dataset."""

    name: str = ""
    """Rewards and failures are reported by it; empty: the task's name, or the file's without its ending."""
    task: str = ""
    """Built-in task: addition, reverse or sort_digits."""
    reasoning_gym: str = ""
    """Name of a reasoning-gym dataset (extra `tasks`)."""
    path: str = ""
    """JSONL or Parquet file, or a folder of them, or one written by `datasets.save_to_disk`."""
    hub: str = ""
    """Dataset of the Hugging Face hub, such as openai/gsm8k (extra `datasets`)."""
    hub_config: str = ""
    """Its configuration, such as main."""
    split: str = ""
    """Split of a folder that holds several, or of a hub dataset, such as train."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the built-in or reasoning-gym task, such as num_digits."""
    seed: int = 0
    """Of generated problems; the order of training is decided by run.seed."""
    num_prompts: int = Field(default=0, ge=0)
    """Prompts to take, from the front of a file or drawn from a task's problems; 0: all there are."""
    prompt_column: str = "prompt"
    """Column with the prompt's text."""
    messages_column: str = ""
    """Column with chat messages (a list of role and content), instead of `prompt_column`."""
    answer_column: str = "answer"
    """Column with the reference answer; empty: there is none."""
    answer_pattern: str = ""
    """Regular expression whose first group is the answer within the column, such as `#### (.+)`."""
    id_column: str = ""
    """Column that identifies the row; empty: its number."""
    source_column: str = ""
    """Column that names the source of each row; empty: `name`."""
    task_columns: tuple[str, ...] = ()
    """Further columns that the reward may read, under their names."""
    template: str = "{prompt}"
    """Text around a prompt; `{prompt}` is replaced."""
    weight: float | None = Field(default=None, gt=0)
    """Share of this source among all that are drawn from. Give one to every source or to none; with none all
    rows are one pool, seen once an epoch."""
    end_weight: float | None = Field(default=None, ge=0)
    """Weight after `data.curriculum_prompts` prompts, reached linearly; empty: `weight` throughout."""

    @field_validator("template")
    @classmethod
    def _has_place(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError(
                f"template {template!r} has no {{prompt}} to replace; put it where the text belongs"
            )
        return template

    @field_validator("answer_pattern")
    @classmethod
    def _has_group(cls, pattern: str) -> str:
        if pattern:
            _require_group(f"answer_pattern {pattern!r}", pattern, "answer")
        return pattern

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        kinds = {"task": self.task, "reasoning_gym": self.reasoning_gym, "path": self.path, "hub": self.hub}
        given = [kind for kind, value in kinds.items() if value]
        if len(given) != 1:
            raise ValueError(
                f"a source names {' and '.join(given) or 'nothing to read'}; give exactly one of task, "
                "reasoning_gym, path and hub"
            )
        if self.reasoning_gym and self.num_prompts == 0:
            raise ValueError("a reasoning_gym source is endless; set num_prompts")
        if self.hub and not self.split:
            raise ValueError(f"source {self.hub!r} of the hub has no split; name one, such as train")
        return self

    @property
    def label(self) -> str:
        """`name`, or what stands for it."""
        return self.name or self.task or self.reasoning_gym or self.hub or PurePath(self.path).stem


class DataConfig(Section):
    """What is asked, in which order, and what is kept back for evaluation."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Sources of training prompts."""
    held_out: tuple[SourceConfig, ...] = ()
    """Sources of evaluation prompts. A training prompt with the same text is refused."""
    held_out_frac: float = Field(default=0.0, ge=0, lt=1)
    """Share of `sources` that is kept back for evaluation, by a hash of the prompt's text."""
    shuffle: bool = True
    """Order by (run.seed, epoch); false: as they stand."""
    num_epochs: int = Field(default=0, ge=0)
    """Times the data is seen before it is exhausted; 0: without end."""
    curriculum_prompts: int = Field(default=0, ge=0)
    """Prompts over which `weight` moves to `end_weight`."""
    chat: bool = False
    """Wrap `prompt_column` as a user message in the tokenizer's chat template (messages always are)."""
    system_prompt: str = ""
    """System message put before the others; needs chat or messages."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Longest prompt; 0: what the model's context leaves beside a response."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """What happens to longer ones: an error before the first step, or left out and counted."""

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        for sources in (self.sources, self.held_out):
            labels = [source.label for source in sources]
            for label in labels:
                if labels.count(label) > 1:
                    raise ValueError(f"two data sources are called {label!r}; give them names")
        return self

    @model_validator(mode="after")
    def _weights_agree(self) -> Self:
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError(
                "some data.sources have a weight and some have none; give one to each or to none"
            )
        if any(weighted) and self.num_epochs:
            raise ValueError(
                f"data.num_epochs is {self.num_epochs} with weighted sources, which have no common epoch; "
                "use num_epochs = 0 and run.num_steps"
            )
        moving = any(source.end_weight is not None for source in self.sources)
        if moving and not (all(weighted) and self.curriculum_prompts):
            raise ValueError(
                "an end_weight stands alone; give a weight to every source, and data.curriculum_prompts"
            )
        if self.curriculum_prompts and not moving:
            raise ValueError(
                "data.curriculum_prompts has no effect without an end_weight; give one, or set it to 0"
            )
        if self.system_prompt and not (self.chat or any(s.messages_column for s in self.sources)):
            raise ValueError(
                "data.system_prompt has no effect in plain prompts; set chat = true or a messages_column"
            )
        if moving and all(source.end_weight == 0 for source in self.sources):
            raise ValueError("every end_weight is 0, so nothing would be left to draw from; keep one above 0")
        return self


class EndpointConfig(Section):
    """A model behind an OpenAI-compatible server: it answers, and its weights are never updated."""

    url: str
    """Up to and including /v1, such as http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model there."""
    token_file: str = ""
    """File that holds the server's API key; empty: it asks for none. The key itself is written nowhere."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Longest one request may take, repetitions included."""
    max_attempts: int = Field(default=4, ge=1)
    """Tries of one request: after a lost connection, or an answer 429, 502, 503 or 504."""
    max_requests: int = Field(default=32, ge=1)
    """Requests at once; further ones wait, and their deadline begins when they are sent."""

    @model_validator(mode="after")
    def _is_plain(self) -> Self:
        """Of the whole section, so that a message never shows what stands in the url."""
        scheme, _, rest = self.url.partition("://")
        host = rest.partition("/")[0]
        if scheme not in ("http", "https") or not host:
            raise ValueError("the url is no address of a server; write it as http://host:port/v1")
        if "@" in host:
            raise ValueError(
                "the url holds a name or a password; put the key into a file and name it in token_file"
            )
        return self


class JudgeConfig(Section):
    """A model that reads question and response, and says a number."""

    endpoint: EndpointConfig
    """The model."""
    template: str = (
        "Grade an answer.\n\nQuestion:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to grade:\n"
        "{response}\n\nReason briefly. Then end with a line of its own, 'Score: N', where N is a whole number from "
        "0 (wrong) to 10 (right, as the reference is)."
    )
    """What it is asked, as a user's message. {prompt}, {answer} and {response} are replaced, once; a response that
    contains them is left as it is."""
    score_pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the number; the last place that matches counts."""
    lowest: float = 0.0
    """Number that becomes a reward of 0."""
    highest: float = 10.0
    """Number that becomes a reward of 1. A number outside lowest to highest is a failure."""
    max_response_tokens: int = Field(default=512, ge=1)
    """Longest answer of the judge."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""

    @model_validator(mode="after")
    def _can_score(self) -> Self:
        if "{response}" not in self.template:
            raise ValueError(
                "the judge's template has no {response}; put it where the answer to grade belongs"
            )
        _require_group(f"score_pattern {self.score_pattern!r}", self.score_pattern, "number")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest is {self.lowest:g} and highest {self.highest:g}; raise highest")
        return self


class RewardTermConfig(Section):
    """One scorer and its weight."""

    function: str
    """exact, numeric, digits, math_verify, reasoning_gym, judge, or an import path `module:function`."""
    name: str = ""
    """Name of the term in metrics; empty: the function's."""
    weight: float = 1.0
    """Factor of the term in the reward."""
    sources: tuple[str, ...] = ()
    """Score prompts of these sources only; empty: all."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    isolation: Isolation = "auto"
    """Where it runs: in the event loop (only what is quick and cannot hang), on a thread, or in a process of its
    own, where signals work and a hung call can be killed. auto: as the built-in needs, else a thread."""
    full_marks: float = 1.0
    """What the reference answer must score in the self-test."""
    is_tested: bool = True
    """False: the self-test leaves this term out, because it is not about the answer."""
    judge: JudgeConfig | None = None
    """Of `function = "judge"`: the model that is asked, and how."""

    @model_validator(mode="after")
    def _judge_is_whole(self) -> Self:
        if (self.function == JUDGE) != (self.judge is not None):
            raise ValueError(
                "a reward term has a judge table and another function; remove one of them"
                if self.judge is not None
                else "a reward term asks a judge and does not say which; give it judge.endpoint.url and .model"
            )
        if self.function == JUDGE and (self.options or self.isolation != "auto"):
            raise ValueError("a judge takes no options and no isolation: it is asked over HTTP; remove them")
        return self


class RewardConfig(Section):
    """How a response is judged. A scorer that fails gives no reward, never a zero."""

    terms: tuple[RewardTermConfig, ...] = (RewardTermConfig(function="exact"),)
    """The reward is the weighted sum of these."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Longest time one call may take; afterwards the trajectory fails as a timeout."""
    start_deadline_s: float = Field(default=60.0, gt=0)
    """Longest time a scorer process may take to start and import its functions."""
    search_path: tuple[str, ...] = ()
    """Folders in which the modules of import paths are looked for, beside Python's own path. Empty: the config's folder
    and the current one, which `rollbook train` then writes down here."""
    num_workers: int = Field(default=2, ge=1)
    """Calls at once, for threads and for processes each."""
    self_test_prompts: int = Field(default=4, ge=0)
    """Prompts of each source whose reference answer must score full marks, and a wrong one less, before the
    first step; 0: no test."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if not self.terms:
            raise ValueError("reward.terms is empty; name at least one scorer, such as exact")
        names = [term.name or term.function for term in self.terms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two reward.terms are called {name!r}; give them names")
            if name in ("score", "reward", "overlong"):
                raise ValueError(
                    f"a reward term is called {name!r}, which is the sum's own name; call it otherwise"
                )
        return self
