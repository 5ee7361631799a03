"""What can be wrong with prompts, found before the first step and named by file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from rollbook.envs.config import DataConfig
from rollbook.envs.dataset import Prompts, load_prompts, require_enough
from rollbook.errors import ConfigError, DataError
from rollbook.types import Ids


class ByteTokenizer:
    """One token a byte; id 256 begins a text, 257 ends one."""

    eos_ids = (257,)

    def __init__(self, *, chat: bool = False, adds_eos: bool = False) -> None:
        self.has_chat_template = chat
        self.adds_eos = adds_eos

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Ids:
        ids = list(text.encode())
        if add_special_tokens:
            ids = [256, *ids, 257] if self.adds_eos else [256, *ids]
        return np.array(ids, np.int32)

    def decode(self, ids: Ids | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(int(i) for i in ids if i < 256).decode()

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Ids:
        return self.encode("".join(f"<{m['role'][0]}>{m['content']}" for m in messages) + "<a>")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(
    path: Path, *, tokenizer: ByteTokenizer | None = None, max_prompt_tokens: int = 99, **fields: Any
) -> Prompts:
    source_keys = {
        "prompt_column", "messages_column", "answer_column", "answer_pattern", "id_column", "source_column",
        "task_columns", "template", "num_prompts", "split",
    }  # fmt: skip
    source = {"path": str(path)} | {k: v for k, v in fields.items() if k in source_keys}
    rest = {k: v for k, v in fields.items() if k not in source_keys}
    config = DataConfig.model_validate({"sources": [source]} | rest)
    return load_prompts(config, tokenizer or ByteTokenizer(), max_prompt_tokens=max_prompt_tokens)


def texts(prompts: Prompts) -> list[str]:
    return [ByteTokenizer().decode(p.prompt_ids.tolist()) for one in prompts.train for p in one]


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": 4}]


def test_jsonl_rows_become_prompts(tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "sums.jsonl", ROWS), template="Q: {prompt}")
    (prompts,) = loaded.train
    assert texts(loaded) == ["Q: 1+1=", "Q: 2+2="]
    assert prompts[0].prompt_ids.tolist()[:2] == [256, ord("Q")]
    assert [p.prompt_id for p in prompts] == ["sums/0", "sums/1"]
    assert [p.task for p in prompts] == [{"answer": "2"}, {"answer": 4}]
    assert {p.source for p in prompts} == {"sums"}


def test_columns_are_mapped(tmp_path: Path) -> None:
    """As GSM8K is written, with an id, a source and a column for the reward."""
    rows = [{"question": "eggs?", "solution": "9 * 2\n#### 1,018", "key": "k7", "from": "gsm", "level": 3}]
    loaded = load(
        write(tmp_path / "rows.jsonl", rows),
        prompt_column="question",
        answer_column="solution",
        answer_pattern=r"#### (.+)",
        id_column="key",
        source_column="from",
        task_columns=["level"],
    )
    ((prompt,),) = loaded.train
    assert prompt.prompt_id == "rows/k7"
    assert prompt.source == "gsm"
    assert prompt.task == {"answer": "1,018", "level": 3}


def test_parquet_folder_and_saved_dataset_read_alike(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}])
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    pa.parquet.write_table(table, hub / "train-00000-of-00001.parquet")
    pa.parquet.write_table(table.slice(1), hub / "test-00000-of-00001.parquet")
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    with pa.OSFile(str(saved / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for path, fields in (("rows.parquet", {}), ("hub", {"split": "train"}), ("saved", {"split": "train"})):
        assert texts(load(tmp_path / path, **fields)) == ["a", "c"], path
    assert texts(load(tmp_path / "hub", split="test")) == ["c"]


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}], "answer": "x"}]
    loaded = load(
        write(tmp_path / "chat.jsonl", rows),
        tokenizer=ByteTokenizer(chat=True),
        messages_column="messages",
        system_prompt="be brief",
    )
    ((prompt,),) = loaded.train
    assert bytes(prompt.prompt_ids.tolist()).decode() == "<s>be brief<u>hi<a>"  # no second start token


def test_held_out_problems_are_never_trained(tmp_path: Path) -> None:
    """Split by the text: a repeated problem falls on one side with its copy."""
    rows = [{"prompt": f"{n % 500}+1=", "answer": "x"} for n in range(1000)]
    loaded = load(write(tmp_path / "rows.jsonl", rows), held_out_frac=0.2)
    held_out = {bytes(p.prompt_ids.tolist()[1:]) for p in loaded.held_out}
    assert held_out.isdisjoint(t.encode() for t in texts(loaded))
    assert loaded.num_train + len(loaded.held_out) == 1000
    assert 0.12 < len(loaded.held_out) / 1000 < 0.28
    again = load(tmp_path / "rows.jsonl", held_out_frac=0.3)
    assert held_out <= {bytes(p.prompt_ids.tolist()[1:]) for p in again.held_out}  # a larger share only adds


def test_a_held_out_file_that_overlaps_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", ROWS[1:])
    with pytest.raises(
        DataError, match=r"1 training prompts are also held out.*train.jsonl line 2.*test.jsonl line 1"
    ):
        load(tmp_path / "train.jsonl", held_out=[{"path": str(tmp_path / "test.jsonl")}])


def test_prompts_that_are_too_long_are_counted_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "9" * 40, "answer": "x"}])
    with pytest.raises(DataError, match=r"1 of 3 prompts are longer than 20 tokens.*line 3, has 41"):
        load(path, max_prompt_tokens=20)
    dropped = load(path, max_prompt_tokens=20, long_prompts="drop")
    assert dropped.num_dropped_long == 1
    assert "1 prompts" in dropped.notes[0]
    with pytest.raises(DataError, match="longer than 10 tokens"):  # the section may only lower the limit
        load_prompts(
            DataConfig.model_validate({"sources": [{"path": str(path)}], "max_prompt_tokens": 10}),
            ByteTokenizer(),
            max_prompt_tokens=20,
        )


def test_fewer_prompts_than_a_step(tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "rows.jsonl", ROWS))
    require_enough(loaded, groups_per_step=2)
    with pytest.raises(DataError, match="needs 3 prompts.*has 2"):
        require_enough(loaded, groups_per_step=3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no rows"),
        (b"\n\n", "has no rows"),
        (b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xe9"}\n', r"line 2 is not UTF-8: byte 43 .* 0xe9"),
        (b'{"prompt": "a", "answer"\n', r"line 1 is not JSON: .* column 25"),
        (b'["a"]\n', "line 1 holds a list, not an object"),
        (b'{"question": "a", "answer": "b"}\n', r"no column 'prompt' \(its columns: question, answer\)"),
        (b'{"prompt": "a"}\n', "no column 'answer'"),
        (b'{"prompt": "a", "answer": null}\n', "'answer' is empty"),
        (b'{"prompt": 3, "answer": "b"}\n', "holds int 3, not a text"),
        (b'{"prompt": "", "answer": "b"}\n', "holds an empty text"),
        (b'{"prompt": null, "answer": "b"}\n', "holds nothing .null., not a text"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        load(tmp_path / "rows.jsonl")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "messages are str 'hi', not a list"),
        ([], "messages are list"),
        ([{"content": "x"}], "a message is dict"),
        ([{"role": "user", "content": 3}], "content is int 3"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "from the assistant"),
    ],
)
def test_bad_messages_are_named_by_line(tmp_path: Path, messages: Any, says: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"messages": messages, "answer": "x"}])
    with pytest.raises(DataError, match=f"line 1.*{says}"):
        load(path, messages_column="messages", tokenizer=ByteTokenizer(chat=True))


def test_messages_without_a_chat_template(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "x"}], "answer": "y"}])
    with pytest.raises(ConfigError, match="no chat template"):
        load(path, messages_column="messages")


def test_duplicate_ids_name_both_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"id": 7, **row} for row in ROWS])
    with pytest.raises(DataError, match=r"line 2 and .*line 1 have the same id 'rows/7'"):
        load(path, id_column="id")


def test_a_missing_file_an_unknown_ending_and_a_broken_parquet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "none.jsonl")
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"ends in '.csv'"):
        load(tmp_path / "rows.csv")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"begins with 'train'; found: rows.parquet"):
        load(tmp_path, split="train")


def test_an_answer_that_the_pattern_misses(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(DataError, match=r"line 1.*'####"):
        load(path, answer_pattern=r"#### (.+)")


def test_more_prompts_than_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert texts(load(path, num_prompts=1)) == ["1+1="]
    with pytest.raises(DataError, match="has 2 rows and num_prompts"):
        load(path, num_prompts=3)


def test_a_tokenizer_that_ends_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="end-of-sequence"):
        load(write(tmp_path / "rows.jsonl", ROWS), tokenizer=ByteTokenizer(adds_eos=True))


def hub(path: Path) -> DataConfig:
    return DataConfig.model_validate({"sources": [{"hub": str(path), "split": "train", "name": "sums"}]})


def test_hub_datasets_load_through_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder takes the library's same path."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "train.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    loaded = load_prompts(hub(tmp_path), ByteTokenizer(), max_prompt_tokens=99)
    assert texts(loaded) == ["1+1="]
    with pytest.raises(DataError, match="cannot be loaded"):
        load_prompts(hub(tmp_path / "nothing"), ByteTokenizer(), max_prompt_tokens=99)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        load_prompts(hub(tmp_path), ByteTokenizer(), max_prompt_tokens=99)
    assert "rollbook[datasets]" in caught.value.remedy
