"""From files and tasks to prompts: read rows, check them, wrap and tokenise them, keep some back.

    source ──read──► Row (text or messages, task, id, where) ──split by hash──► tokenise ──► Prompt

Everything that can be wrong with the data is found here, before the first step, and named by file and line.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from rollbook.envs import reasoning_gym
from rollbook.envs.config import DataConfig, SourceConfig
from rollbook.envs.datasets_hub import hub_records
from rollbook.envs.env import Tokenizer
from rollbook.envs.tasks import problems
from rollbook.errors import ConfigError, DataError
from rollbook.types import Ids, Prompt

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem before tokenisation."""

    row_id: str
    """Unique over all sources: "<source>/<id>"."""
    source: str
    prompt: str | list[Message]
    """Text, or chat messages."""
    task: dict[str, JsonValue]
    """What the reward reads; `answer` where there is one."""
    where: str
    """For messages: "train.jsonl line 12"."""

    def text_key(self) -> str:
        """What decides the split: equal problems fall on one side whatever their ids."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Loaded prompts."""

    train: list[list[Prompt]]
    """One list a source of the config, in its order."""
    held_out: list[Prompt]
    num_dropped_long: int = 0
    """Training and held-out prompts left out by `data.long_prompts = "drop"`."""
    notes: list[str] = field(default_factory=list)
    """What a user should know about the data, a sentence each."""

    @property
    def num_train(self) -> int:
        return sum(len(prompts) for prompts in self.train)


def load_prompts(config: DataConfig, tokenizer: Tokenizer, *, max_prompt_tokens: int) -> Prompts:
    """Read every source.

    Args:
        config: the `[data]` section.
        tokenizer: encodes prompts; needs a chat template where messages are given.
        max_prompt_tokens: what the model's context leaves beside a response; `data.max_prompt_tokens` may lower it.
    Raises:
        DataError: rows that cannot be used, by file and line.
        ConfigError: a task, an option, an extra or a chat template that is missing.
    """
    limit = min(config.max_prompt_tokens or max_prompt_tokens, max_prompt_tokens)
    train_rows = [read_rows(source) for source in config.sources]
    held_out_rows = [row for source in config.held_out for row in read_rows(source)]
    _require_unique(train_rows)
    _require_unique([held_out_rows])
    _require_disjoint(train_rows, held_out_rows)
    if config.held_out_frac:
        kept = [[row for row in rows if not _is_held_out(row, config.held_out_frac)] for rows in train_rows]
        held_out_rows += [
            row for rows in train_rows for row in rows if _is_held_out(row, config.held_out_frac)
        ]
        train_rows = kept

    encoder = _Encoder(config, tokenizer, limit)
    train = [encoder.prompts(rows) for rows in train_rows]
    held_out = encoder.prompts(held_out_rows)
    for source, prompts in zip(config.sources, train):
        if not prompts:
            raise DataError(
                f"data source {source.label!r} has no prompt left to train on (limit {limit} tokens, "
                f"held_out_frac {config.held_out_frac}, {encoder.num_dropped} dropped as too long)",
                "lower data.held_out_frac, raise the limit, or give the source more rows",
            )
    notes = []
    if encoder.num_dropped:
        notes.append(
            f"{encoder.num_dropped} prompts are longer than {limit} tokens and were left out "
            "(data.long_prompts = 'drop')"
        )
    return Prompts(train=train, held_out=held_out, num_dropped_long=encoder.num_dropped, notes=notes)


def require_enough(prompts: Prompts, *, groups_per_step: int) -> None:
    """Raise DataError when one step needs more prompts than there are."""
    if prompts.num_train < groups_per_step:
        raise DataError(
            f"one step needs {groups_per_step} prompts (run.groups_per_step) and the data has {prompts.num_train}",
            f"lower run.groups_per_step to at most {prompts.num_train}, or add rows",
        )


def read_rows(source: SourceConfig) -> list[Row]:
    """Every row of one source, checked."""
    if source.task:
        drawn = problems(source.task, source.options, num_prompts=source.num_prompts, seed=source.seed)
        made: Iterable[tuple[str, dict[str, JsonValue]]] = ((p.prompt, {"answer": p.answer}) for p in drawn)
    elif source.reasoning_gym:
        made = reasoning_gym.tasks(
            source.reasoning_gym, source.options, num_prompts=source.num_prompts, seed=source.seed
        )
    else:
        return list(_table_rows(source))
    return [
        Row(
            row_id=f"{source.label}/{number}",
            source=source.label,
            prompt=source.template.replace("{prompt}", prompt),
            task=task,
            where=f"{source.label} number {number}",
        )
        for number, (prompt, task) in enumerate(made)
    ]


# ---- files ---------------------------------------------------------------------------------------------------


def _table_rows(source: SourceConfig) -> Iterator[Row]:
    num_rows = 0
    for where, record in _source_records(source):
        if source.num_prompts and num_rows == source.num_prompts:
            return
        yield _row(source, record, where, num_rows)
        num_rows += 1
    if num_rows == 0:
        raise DataError(
            f"{source.path or source.hub} has no rows", "give data.sources a file with one problem a row"
        )
    if num_rows < source.num_prompts:
        raise DataError(
            f"{source.path or source.hub} has {num_rows} rows and num_prompts of source {source.label!r} is "
            f"{source.num_prompts}",
            "lower num_prompts; 0 takes every row",
        )


def _source_records(source: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, columns) of each row."""
    if source.hub:
        yield from hub_records(source.hub, config=source.hub_config, split=source.split)
        return
    for path in _files(source):
        yield from _records(path)


def _files(source: SourceConfig) -> list[Path]:
    path = Path(source.path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(
            f"{source.path} does not exist (data source {source.label!r}, seen from {Path.cwd()})",
            "give a path to a JSONL or Parquet file, or to a folder of them",
        )
    saved = path / source.split if (path / "dataset_dict.json").is_file() else path
    if (saved / "state.json").is_file():
        names = [item["filename"] for item in json.loads((saved / "state.json").read_text())["_data_files"]]
        return [saved / name for name in names]
    if saved != path or (path / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in path.glob("*/state.json"))
        raise DataError(
            f"{source.path} holds the splits {', '.join(splits)} and split is {source.split!r}",
            "name one of them as split",
        )
    files = sorted(p for ending in ("jsonl", "parquet") for p in path.rglob(f"*.{ending}"))
    chosen = [p for p in files if p.stem.startswith(source.split)]
    if not chosen:
        found = ", ".join(p.name for p in files[:8]) or "none"
        raise DataError(
            f"{source.path} has no JSONL or Parquet file whose name begins with {source.split!r}; found: {found}",
            "name a file, or the split that its files begin with",
        )
    return chosen


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, columns) of each row."""
    if path.suffix == ".parquet":
        yield from _parquet_records(path)
    elif path.suffix == ".arrow":
        yield from _arrow_records(path)
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        yield from _jsonl_records(path)
    else:
        raise DataError(
            f"{path} ends in {path.suffix!r}, and rows are read from .jsonl and .parquet",
            "rename or convert the file",
        )


def _jsonl_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    start = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where, offset = f"{path} line {number}", start
            start += len(line)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where} is not UTF-8: byte {offset + error.start} of the file is 0x{line[error.start]:02x}",
                    f"convert it, for example: iconv -f latin1 -t utf8 {path.name}",
                ) from None
            if not text:
                continue
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where} is not JSON: {error.msg} at column {error.colno}",
                    "each line holds one object; a pretty-printed array is not JSONL",
                ) from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{where} holds a {type(record).__name__}, not an object",
                    'write each line as {"prompt": ..., "answer": ...}',
                )
            yield where, record


def _parquet_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    yield f"{path} row {number}", record
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {error}", "check that the file is whole"
        ) from None


def _arrow_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as reader:
            number = 0
            for batch in reader:
                for record in batch.to_pylist():
                    yield f"{path} row {number}", record
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as Arrow: {error}", "check that the folder is whole"
        ) from None


def _row(source: SourceConfig, record: Mapping[str, Any], where: str, number: int) -> Row:
    prompt: str | list[Message]
    if source.messages_column:
        prompt = _messages(_column(record, source.messages_column, "messages_column", where), where)
    else:
        text = _column(record, source.prompt_column, "prompt_column", where)
        if not isinstance(text, str) or not text:
            raise DataError(
                f"{where}: column {source.prompt_column!r} holds {_shown(text)}{', not a text' if text != '' else ''}",
                "a prompt is a non-empty string; for chat messages set messages_column",
            )
        prompt = source.template.replace("{prompt}", text)
    task: dict[str, JsonValue] = {}
    for name in source.task_columns:
        task[name] = _json_value(_column(record, name, "task_columns", where), where, name)
    if source.answer_column:
        task["answer"] = _answer(source, _column(record, source.answer_column, "answer_column", where), where)
    label = source.label
    if source.source_column:
        label = str(_column(record, source.source_column, "source_column", where))
    row_id = str(_column(record, source.id_column, "id_column", where)) if source.id_column else str(number)
    return Row(row_id=f"{source.label}/{row_id}", source=label, prompt=prompt, task=task, where=where)


def _column(record: Mapping[str, Any], name: str, option: str, where: str) -> Any:
    if name not in record:
        raise DataError(
            f"{where} has no column {name!r} (its columns: {', '.join(record) or 'none'})",
            f"set {option} of this source to one of them"
            + ('; "" if there is no answer' if option == "answer_column" else ""),
        )
    return record[name]


def _messages(value: Any, where: str) -> list[Message]:
    remedy = 'write messages as [{"role": "user", "content": "..."}], the last one not from the assistant'
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: messages are {_shown(value)}, not a list", remedy)
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: a message is {_shown(message)}", remedy)
        if not isinstance(message.get("content"), str):
            raise DataError(f"{where}: a message's content is {_shown(message.get('content'))}", remedy)
        messages.append({"role": message["role"], "content": message["content"]})
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message is from the assistant, which is what the policy writes", remedy
        )
    return messages


def _answer(source: SourceConfig, value: Any, where: str) -> JsonValue:
    if value is None:
        raise DataError(
            f"{where}: column {source.answer_column!r} is empty", "give an answer, or set answer_column to ''"
        )
    if not source.answer_pattern:
        return _json_value(value, where, source.answer_column)
    found = re.search(source.answer_pattern, str(value))
    if found is None:
        raise DataError(
            f"{where}: column {source.answer_column!r} holds {_shown(value)}, which answer_pattern "
            f"{source.answer_pattern!r} does not match",
            "mend the row or the pattern",
        )
    return found.group(1).strip()


def _json_value(value: Any, where: str, column: str) -> JsonValue:
    try:
        kept: JsonValue = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise DataError(
            f"{where}: column {column!r} holds {_shown(value)}, which is no JSON value",
            "a reward reads text, numbers, lists and objects; convert the column",
        ) from None
    return kept


def _shown(value: Any) -> str:
    """A cell as a user would name it."""
    if value is None:
        return "nothing (null)"
    if value == "":
        return "an empty text"
    text = repr(value)
    return f"{type(value).__name__} {text[:60] + '...' if len(text) > 60 else text}"


# ---- checks and the split ------------------------------------------------------------------------------------


def _is_held_out(row: Row, frac: float) -> bool:
    digest = hashlib.sha256(row.text_key().encode()).digest()
    return int.from_bytes(digest[:8], "big") < math.floor(frac * 2**64)


def _require_unique(rows_by_source: Iterable[list[Row]]) -> None:
    seen: dict[str, str] = {}
    for rows in rows_by_source:
        for row in rows:
            if row.row_id in seen:
                raise DataError(
                    f"{row.where} and {seen[row.row_id]} have the same id {row.row_id!r}",
                    "ids are unique; leave id_column empty to use row numbers",
                )
            seen[row.row_id] = row.where


def _require_disjoint(train: Iterable[list[Row]], held_out: list[Row]) -> None:
    kept_back = {row.text_key(): row.where for row in held_out}
    both = [row for rows in train for row in rows if row.text_key() in kept_back]
    if both:
        raise DataError(
            f"{len(both)} training prompts are also held out; the first is {both[0].where} "
            f"({kept_back[both[0].text_key()]})",
            "take them out of one side, or use data.held_out_frac on one set of rows",
        )


# ---- tokens --------------------------------------------------------------------------------------------------


class _Encoder:
    """Rows to prompts, with the token limit."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, limit: int) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.limit = limit
        self.num_dropped = 0

    def prompts(self, rows: list[Row]) -> list[Prompt]:
        made: list[Prompt] = []
        too_long: list[tuple[int, Row]] = []
        for row in rows:
            ids = self._encode(row)
            if len(ids) > self.limit:
                too_long.append((len(ids), row))
            else:
                made.append(
                    Prompt(
                        prompt_id=row.row_id,
                        prompt_ids=ids,
                        source=row.source,
                        task=row.task,
                        messages=tuple(self._conversation(row)),
                    )
                )
        if too_long and self.config.long_prompts == "refuse":
            longest, worst = max(too_long, key=lambda pair: pair[0])
            raise DataError(
                f"{len(too_long)} of {len(rows)} prompts are longer than {self.limit} tokens; the longest, "
                f"{worst.where}, has {longest}",
                "set data.long_prompts = 'drop', raise data.max_prompt_tokens, or take a model with a longer "
                "context or a smaller response limit",
            )
        self.num_dropped += len(too_long)
        return made

    def _encode(self, row: Row) -> Ids:
        messages = self._as_messages(row)
        if messages is None:
            assert isinstance(row.prompt, str)
            ids = self.tokenizer.encode(row.prompt, add_special_tokens=True)
            if len(ids) and int(ids[-1]) in self.tokenizer.eos_ids:
                raise ConfigError(
                    "the tokenizer ends each prompt with the end-of-sequence token, after which nothing follows",
                    "set add_eos_token to false in the model's tokenizer_config.json",
                )
        else:
            ids = self.tokenizer.encode_chat(messages)
        if not len(ids):
            raise DataError(f"{row.where}: the prompt has no tokens", "a prompt has at least one token")
        return ids

    def _as_messages(self, row: Row) -> list[Message] | None:
        """The row as chat messages, or None where it is plain text."""
        if isinstance(row.prompt, str) and not self.config.chat:
            return None
        if not self.tokenizer.has_chat_template:
            raise ConfigError(
                f"{row.where} is a chat, and the model's tokenizer has no chat template",
                "use a chat model, put a chat_template.jinja into its folder, or give plain prompts (prompt_column, "
                "chat = false)",
            )
        return self._conversation(row)

    def _conversation(self, row: Row) -> list[Message]:
        """The row as chat messages; plain text is its user's."""
        is_text = isinstance(row.prompt, str)
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        if self.config.system_prompt and not (is_text and not self.config.chat):
            return [{"role": "system", "content": self.config.system_prompt}, *messages]
        return list(messages)
