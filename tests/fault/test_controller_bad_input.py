"""What a user gets wrong, through the command line: one error with values, one hint, exit code 2, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import rollbook.checkpoint.checkpoint as checkpoint_module
import tiny_rewards
from fresh_process import in_fresh_process
from rollbook.cli import main as cli
from rollbook.controller.loop import Controller
from rollbook.envs.rewards.result import RewardResult
from rollbook.modeling.load import load_model
from rollbook.types import Failure, FailureKind
from tiny_run import Fault, RunResult, TinyRun, as_set, injected, run_tiny, tiny_config, write_tiny

ROWS = [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(4)]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run `rollbook train` on a config that cannot run; gives what it says: (error, hint)."""

    def refuse(
        *, config: Mapping[str, Any] | None = None, faults: list[Fault] | None = None, **overrides: Any
    ) -> tuple[str, str]:
        path = write_tiny(tmp_path, config=config)
        before = snapshot(tmp_path)
        said = train([str(path)], capsys, faults=faults or [], overrides=overrides)
        assert snapshot(tmp_path) == before  # neither a run directory nor anything else
        return said

    return refuse


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file and folder under `folder`, with what it holds. The lock names the process that holds it."""
    found = [path for path in folder.rglob("*") if path.name not in ("lock", "__pycache__")]
    return {str(path): b"" if path.is_dir() else path.read_bytes() for path in found}


def train(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    *,
    faults: list[Fault] | None = None,
    overrides: Mapping[str, Any] | None = None,
    exit_code: int = 2,
) -> tuple[str, str]:
    settings = [part for one in as_set(overrides or {}) for part in ("--set", one)]
    with injected(faults or []), pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments, *settings])
    said = capsys.readouterr()
    assert ended.value.code == exit_code, said.err
    assert said.out == ""
    assert "Traceback" not in said.err
    error, _, hint = said.err.partition("\nhint: ")
    return error.removeprefix("error: "), hint.strip()


def rows_file(folder: Path, *rows: Mapping[str, Any], name: str = "rows.jsonl") -> dict[str, Any]:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data.sources": [{"path": str(folder / name)}]}


# ---- models


def saved_model(folder: Path) -> Path:
    load_model(tiny_config().model).save(folder)
    return folder


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json of .* cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (
            lambda folder: os.truncate(folder / "model.safetensors", 5000),
            "model.safetensors of .* cannot be read",
        ),
        (lambda folder: os.truncate(folder / "model.safetensors", 0), "cannot be read"),
    ],
    ids=["no_folder", "no_config", "bad_config", "no_weights", "cut_weights", "empty_weights"],
)
def test_a_model_folder_that_cannot_be_read_is_named(
    refused: Any, tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    folder = saved_model(tmp_path / "policy")
    damage(folder)
    error, hint = refused(config={"model": {"path": str(folder)}})
    assert str(folder) in error
    assert re.search(says, error)
    assert hint


def test_messages_need_a_chat_template(refused: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = saved_model(tmp_path / "policy")
    for path in folder.glob("token*"):
        path.unlink()
    plain = Tokenizer(models.WordLevel({"1": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", eos_token="</s>").save_pretrained(
        folder
    )
    error, hint = refused(
        config={"model": {"path": str(folder)}},
        **rows_file(tmp_path, {"messages": [{"role": "user", "content": "1"}], "answer": "1"}),
        **{"data.sources.0.messages_column": "messages", "run.groups_per_step": 1},
    )
    assert "rows.jsonl line 1 is a chat, and the model's tokenizer has no chat template" in error
    assert "chat_template.jinja" in hint


# ---- prompts


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([], {}, "rows.jsonl has no rows"),
        ([*ROWS, {"prompt": "1" * 40, "answer": "1"}], {}, "1 of 5 prompts are longer than 26 tokens"),
        ([{"question": "1+2=", "answer": "3"}], {}, "line 1 has no column 'prompt'"),
        ([{"prompt": "1+2="}], {}, "line 1 has no column 'answer'"),
        ([row | {"id": 7} for row in ROWS], {"id_column": "id"}, "have the same id 'rows/7'"),
        (ROWS[:3], {}, r"needs 4 prompts \(run.groups_per_step\) and the data has 3"),
        ([*ROWS, {"prompt": "what?", "answer": "1"}], {}, "does not know"),
        ([*ROWS, {"prompt": "", "answer": "1"}], {}, "line 5"),
    ],
    ids=["empty", "too_long", "no_column", "no_answer", "same_id", "too_few", "alphabet", "no_text"],
)
def test_prompts_that_cannot_be_used_are_named_before_the_first_step(
    refused: Any, tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], says: str
) -> None:
    overrides = rows_file(tmp_path, *rows)
    overrides["data.sources"][0].update(options)
    error, hint = refused(**overrides)
    assert re.search(says, error)
    assert hint


def test_a_file_that_is_not_utf8_is_named_by_line_and_byte(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(
        b'{"prompt": "1", "answer": "1"}\n{"prompt": "\xe9", "answer": "1"}\n'
    )
    error, hint = refused(**{"data.sources": [{"path": str(tmp_path / "rows.jsonl")}]})
    assert error.endswith("rows.jsonl line 2 is not UTF-8: byte 43 of the file is 0xe9")
    assert "iconv" in hint


# ---- configs


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"rollout.group_size": 1}, "compares the members of a group, and rollout.group_size is 1"),
        ({"rollout.temprature": 0.5}, "unknown key rollout.temprature"),
        ({"data.sources.0.task": "adition"}, "data source task 'adition' does not exist"),
        ({"reward.terms.0.function": "nomodule:f"}, "reward function 'nomodule:f'"),
        ({"reward.terms.0.function": "tiny_rewards:nope"}, "tiny_rewards has no function 'nope'"),
        ({"eval.num_prompts": 3}, "eval.num_prompts is 3 and 0 prompts are held out"),
        ({"algorithm.name": "distill"}, "algorithm.distill.placement is 'advantage'"),
        ({"rollout.engine": "vllm"}, "rollout.engine is 'vllm'"),
        ({"sync.transport": "disk"}, "sync.disk_dir is empty"),
        ({"model.device": "gpu"}, "model.device is 'gpu'"),
        ({"rollout.device": "cuda:x"}, "rollout.device is 'cuda:x'"),
        ({"rollout.kv_pool_tokens": 8}, "7 + 6 tokens of keys and values and the pool holds 8"),
        ({"rollout.max_response_tokens": 32}, "rollout.max_response_tokens is 32 and the model's context"),
        ({"algorithm.filter.drop_flat": True, "algorithm.filter.metric": "tone"}, "no reward term 'tone'"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_config_that_cannot_run_is_refused_with_its_values(
    refused: Any, overrides: dict[str, Any], says: str
) -> None:
    error, hint = refused(**overrides)
    assert says in error
    assert hint


def test_a_cuda_engine_without_cuda_is_refused(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (
        "rollout.device is 'cuda' and torch sees no CUDA device" in refused(**{"rollout.device": "cuda"})[0]
    )
    assert "model.device is 'cuda' and torch sees no CUDA device" in refused(**{"model.device": "cuda"})[0]


def test_what_keeps_a_config_from_starting_is_reported_with_the_contradictions(refused: Any) -> None:
    """Installation and machine too: one try, no run directory."""
    overrides = {"rollout.device": "cuda:7", "model.device": "cuda:9", "rollout.group_size": 1}
    error, _ = refused(**overrides)
    assert error.startswith("3 problems:")
    assert "rollout.device is 'cuda:7'" in error
    assert "model.device is 'cuda:9'" in error


def test_a_hub_model_that_cannot_be_reached_is_said_in_words(
    refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    error, hint = refused(config={"model": {"path": "someone/some-model"}})
    assert "model.path 'someone/some-model' is no folder (seen from " in error
    assert "it cannot be reached (no network, or offline mode) and is not in the local cache" in error
    assert "download the model first" in hint


def test_a_folder_that_may_not_be_written_is_named_and_not_what_would_lie_below_it(
    refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()

    def denied(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", denied)
    error, hint = refused(**{"run.dir": str(tmp_path / "theirs" / "runs")})
    assert f"no permission to write into {tmp_path / 'theirs'} (it belongs to user id " in error
    assert "lock" not in error
    assert "run.dir" in hint


def test_every_contradiction_is_reported_at_once(refused: Any) -> None:
    error, hint = refused(
        **{
            "rollout.group_size": 1,
            "rollout.temperature": 0,
            "buffer.max_staleness_steps": 1,
            "buffer.group_deadline_s": 9999,
            "sync.every_steps": 3,
            "trainer.num_mini_batches": 100,
        }
    )
    assert error.startswith("6 problems:")
    assert hint == "mend each of them"
    arrival = {"run.schedule": "separate_async", "buffer.order": "arrival"}
    assert "on-policy every step takes exactly what was admitted" in refused(**arrival)[1]
    on_policy = {"run.schedule": "colocate_async", "buffer.max_staleness_steps": 0}
    assert "responses that continue" in refused(**on_policy)[1]
    narrow = {
        "run.schedule": "separate_async",
        "buffer.max_running_groups": 2,
        "buffer.max_staleness_steps": 1,
    }
    assert "buffer.max_running_groups is 2" in refused(**narrow)[0]
    unmeasured = {"algorithm.entropy_coef": 0.1, "trainer.measure_entropy": False}
    assert "the bonus is of the entropy that is measured" in refused(**unmeasured)[1]


# ---- rewards


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", "ZeroDivisionError: the grader divided by zero"),
        ("not_a_number", "the scorer's value is nan"),
        ("words", "the scorer's value is str 'good'"),
    ],
)
def test_a_scorer_that_cannot_score_stops_the_run_before_the_first_step_in_its_own_words(
    refused: Any, function: str, says: str
) -> None:
    error, _ = refused(**{"reward.terms.0.function": f"tiny_rewards:{function}"})
    assert "all 4 trial trajectories of preflight failed as reward" in error
    assert says in error
    error, _ = refused(
        **{"reward.terms.0.function": f"tiny_rewards:{function}", "reward.terms.0.is_tested": True}
    )
    assert "the reward failed its self-test: source 'addition'" in error
    assert says in error


def test_a_scorer_that_fails_on_the_first_trial_only_is_a_note_and_no_reason_to_stop(
    tiny_run: TinyRun,
) -> None:
    calls: list[str] = []

    def score_second(controller: Controller) -> None:
        plain = controller.scorer.score

        async def score(response: str, prompt: Any) -> Any:
            calls.append(response)
            if len(calls) == 1:
                return RewardResult(
                    reward=None, failure=Failure(kind=FailureKind.REWARD, message="ValueError: even length")
                )
            return await plain(response, prompt)

        controller.scorer.score = score  # type: ignore[method-assign]

    run = tiny_run(num_steps=1, faults=[score_second])
    (event,) = run.events_of("preflight")
    assert "1 of 2 trial trajectories failed, the first as reward: ValueError: even length" in event["notes"]


def test_a_data_source_that_no_term_judges_is_refused(refused: Any) -> None:
    """Its trajectories would fail one by one, below the limit of failures, all run long."""
    error, hint = refused(
        **{
            "data.sources": [
                {"task": "addition", "num_prompts": 38},
                {"name": "odd", "task": "addition", "num_prompts": 2, "options": {"num_digits": 1}},
            ],
            "reward.terms.0.sources": ["addition"],
        }
    )
    assert "no reward term applies to data source 'odd' (prompt odd/0)" in error
    assert "reward.terms" in hint


def test_a_scorer_that_breaks_down_later_stops_the_run_resumable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the second step on every call fails: the share of failures, the cause and the limit are named."""

    def breaks(controller: Controller) -> None:
        score = controller.scorer.score

        async def failing(response: str, prompt: Any) -> Any:
            if controller.num_steps_done:
                tiny_rewards.broken = True
            return await score(response, prompt)

        controller.scorer.score = failing  # type: ignore[method-assign]

    try:
        arguments = [str(write_tiny(tmp_path, num_steps=4))]
        overrides = {"reward.terms.0.function": "tiny_rewards:breaks_down"}
        error, hint = train(arguments, capsys, faults=[breaks], overrides=overrides)
    finally:
        tiny_rewards.broken = False
    assert "trajectories failed" in error
    assert "RuntimeError: the grader is gone" in error
    assert "run.max_failure_frac (now 0.25)" in hint
    run = RunResult(tmp_path / "run")
    assert len(run.metrics) == 1
    assert run.events_of("run_failed")[0]["error"] == error
    cli_resume(tmp_path / "run", capsys)
    assert len(run.metrics) == 4


def cli_resume(folder: Path, capsys: pytest.CaptureFixture[str], **overrides: Any) -> None:
    settings = [part for one in as_set(overrides) for part in ("--set", one)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--resume", str(folder), *settings])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert said.out == f"{folder}\n"


# ---- run directories


def test_a_run_directory_is_not_overwritten_and_a_run_that_is_none_not_resumed(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run()
    before = (run.folder / "metrics.jsonl").read_bytes()
    error, hint = train([str(tmp_path / "run.toml")], capsys)
    assert "already holds a run (last finished step 1)" in error
    assert f"rollbook train --resume {run.folder}" in hint
    assert (run.folder / "metrics.jsonl").read_bytes() == before
    assert "has no config.toml" in train(["--resume", str(tmp_path)], capsys)[0]
    assert "needs either a config file or --resume" in train([], capsys)[0]
    error, hint = train([str(tmp_path / "run.toml"), "--resume", str(run.folder)], capsys)
    assert f"run.toml) and --resume {run.folder} exclude each other" in error
    assert f"to go on: rollbook train --resume {run.folder}" in hint
    assert "there is no config file" in train([str(tmp_path / "rn.toml")], capsys)[0]
    (tmp_path / "empty").mkdir()
    _, hint = train([str(tmp_path / "empty" / "rn.toml")], capsys)
    assert str(tmp_path / "empty") in hint and "run directory" in hint
    (tmp_path / "file").write_text("")
    assert train([str(tmp_path / "run.toml")], capsys, overrides={"run.dir": str(tmp_path / "file")})[1]


def test_a_run_directory_in_use_is_refused_by_the_process_that_holds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[tuple[str, str]] = []

    def second_run(controller: Controller) -> None:
        log = tmp_path / "log"
        arguments = ["train", "--resume", str(tmp_path / "run")]
        assert in_fresh_process(cli.main, arguments, log=log) == 2
        error, _, hint = log.read_text().partition("\nhint: ")
        said.append((error, hint))

    run = run_tiny(tmp_path, faults=[second_run])
    assert f"error: run directory {run.folder} is in use by process {os.getpid()}" in said[0][0]
    assert "choose another run directory" in said[0][1]
    assert len(run.metrics) == 2


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_resumes(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = {"rollout.batch_invariant": True, "checkpoint.every_steps": 1}
    whole = tiny_run(name="whole", num_steps=3, **exact)
    run = tiny_run(num_steps=2, **exact)
    newest = run.folder / "checkpoints" / "step_2"
    data = bytearray((newest / "trainer_00.safetensors").read_bytes())
    data[-9] ^= 4
    (newest / "trainer_00.safetensors").write_bytes(data)
    more = {"run.num_steps": 3}
    before = snapshot(run.folder)
    error, hint = train(["--resume", str(run.folder)], capsys, overrides=more)
    assert snapshot(run.folder) == before  # the config too: a refused resume has changed nothing
    assert f"{newest / 'trainer_00.safetensors'} does not have the digest of its manifest" in error
    assert "delete this checkpoint and resume from the one before" in hint
    shutil.rmtree(newest)
    cli_resume(run.folder, capsys, **more)
    for name, tensor in whole.parameters.items():
        assert tensor.equal(run.parameters[name]), name


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"model.path": "nowhere", "model.new": {}}, "model"),
        ({"model.new.hidden_size": 64}, "hidden"),
        ({"reward.terms.0.function": "tiny_rewards:raises", "run.num_steps": 9}, "divided by zero"),
        ({"rollout.group_size": 1}, "group_size is 1"),
    ],
)
def test_a_refused_resume_changes_nothing_in_the_run_directory(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str], overrides: dict[str, Any], says: str
) -> None:
    """Neither its config nor its events; also where a killed process left half a line to repair."""
    run = tiny_run()
    with (run.folder / "events.jsonl").open("a") as events:
        events.write('{"kind": "half')
    before = snapshot(run.folder)
    more = {"run.num_steps": 9, **overrides}
    assert train(["--resume", str(run.folder)], capsys, overrides=more)[1]
    assert snapshot(run.folder) == before
    cli_resume(run.folder, capsys, **{"run.num_steps": 3})
    assert len(run.metrics) == 3
    assert run.events_of("repair")


# ---- the disk is full

EXACT = {"rollout.batch_invariant": True, "checkpoint.every_steps": 1}


class FullDisk:
    """From write number `write` on, files whose name ends in `name` find no space."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, write: int) -> None:
        self.is_full, self.left, self.name = True, write, name
        plain_write, plain_table, plain_save = (
            os.write,
            pyarrow.parquet.write_table,
            checkpoint_module.save_file,
        )

        def os_write(fd: int, data: bytes) -> int:
            self.check(Path(f"/proc/self/fd/{fd}").readlink())
            return plain_write(fd, data)

        def write_table(table: Any, path: Path, **options: Any) -> None:
            self.check(path)
            plain_table(table, path, **options)

        def save_file(tensors: Any, path: Path) -> None:
            self.check(path)
            plain_save(tensors, path)

        monkeypatch.setattr("rollbook.observe.run_dir.os.write", os_write)
        monkeypatch.setattr("rollbook.observe.trajectories.pq.write_table", write_table)
        monkeypatch.setattr(checkpoint_module, "save_file", save_file)

    def check(self, path: Path) -> None:
        if self.is_full and self.name in path.name:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.mark.parametrize(
    ("name", "write", "says"),
    [
        ("metrics.jsonl", 1, "no space left to write .*metrics.jsonl"),
        ("events.jsonl", 50, "no space left to write .*events.jsonl"),
        ("parquet", 1, "no space left to write .*step_1.parquet"),
        ("trainer_00.safetensors", 2, "step_2 could not be written: .*No space left"),
    ],
)
def test_a_full_disk_loses_nothing_that_was_there_and_the_run_goes_on_once_there_is_space(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: int,
    says: str,
) -> None:
    whole = tiny_run(name="whole", num_steps=3, **EXACT)
    disk = FullDisk(monkeypatch, name, write)
    error, hint = train([str(write_tiny(tmp_path, num_steps=3))], capsys, overrides=EXACT)
    assert re.search(says, error)
    assert "free" in hint
    run = RunResult(tmp_path / "run")
    assert len(run.metrics) == 1  # and every line of every file is whole: they were read
    assert run.state["num_steps_done"] <= 1
    disk.is_full = False
    cli_resume(run.folder, capsys)
    assert run.trained == whole.trained
    assert len(run.metrics) == 3
    for tensor_name, tensor in whole.parameters.items():
        assert tensor.equal(run.parameters[tensor_name]), tensor_name


def test_a_checkpoint_that_fails_once_is_written_again(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch, "trainer_00.safetensors", 1)
    check = disk.check

    def once(path: Path) -> None:
        try:
            check(path)
        except OSError:
            disk.is_full = False
            raise

    disk.check = once  # type: ignore[method-assign]
    run = tiny_run(**EXACT)
    (failed,) = run.events_of("checkpoint_failed")
    # That one is there too, not only the later one that would hide its loss.
    written = [e["path"] for e in run.events_of("checkpoint")]
    assert written == [f"checkpoints/step_{step}" for step in range(3)]
    assert failed["num_steps_done"] == 1
    assert run.state["num_steps_done"] == 2


# ---- Ctrl-C


class Interrupts:
    """SIGINT while the trainer computes its update number `update`."""

    def __init__(self, update: int, *, times: int = 1) -> None:
        self.left, self.times = update, times

    def __call__(self, controller: Controller) -> None:
        plain = controller.trainer.update

        def update(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            result = plain(*args, **kwargs)
            if self.left == 0:
                for number in range(self.times):
                    os.kill(os.getpid(), signal.SIGINT)
                    while sum(e["kind"] == "interrupted" for e in self.events(controller)) <= number:
                        pass  # until the event loop has heard it
            return result

        controller.trainer.update = update  # type: ignore[method-assign]

    @staticmethod
    def events(controller: Controller) -> list[dict[str, Any]]:
        return RunResult(controller.recorder.path).events


def takes_the_signals(controller: Controller) -> None:
    """As a library does that comes with handlers of its own."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize(("times", "num_steps_done"), [(1, 2), (2, 0)])
def test_ctrl_c_ends_the_step_with_a_checkpoint_and_a_second_one_ends_at_once(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], times: int, num_steps_done: int
) -> None:
    exact = {"rollout.batch_invariant": True}
    whole = tiny_run(name="whole", num_steps=4, **exact)
    arguments = [str(write_tiny(tmp_path, num_steps=4))]
    faults = [takes_the_signals, Interrupts(update=2, times=times)]
    error, _ = train(arguments, capsys, faults=faults, overrides=exact, exit_code=130)
    assert error.endswith(f"interrupted: `rollbook train --resume {tmp_path / 'run'}` continues\n")
    run = RunResult(tmp_path / "run")
    effects = [event["effect"] for event in run.events_of("interrupted")]
    assert effects[0] == "ending after the step in progress, with a checkpoint"
    assert effects[1:] == ["stopping at once, without the step in progress"][: times - 1]
    remedy = run.events_of("interrupted")[0]["remedy"]
    assert remedy.endswith("then goes on from its newest checkpoint and repeats 2 steps"), (
        "it was in its second"
    )
    assert run.state["num_steps_done"] == num_steps_done
    assert len(run.metrics) == (2 if times == 1 else 1)
    cli_resume(run.folder, capsys)
    assert run.trained == whole.trained
    for name, tensor in whole.parameters.items():
        assert tensor.equal(run.parameters[name]), name


def test_ctrl_c_before_the_first_step_ends_at_once_and_leaves_a_run_to_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warmup = {"warmup.num_updates": 50, "warmup.batch_sequences": 4}
    arguments = [str(write_tiny(tmp_path))]
    train(arguments, capsys, faults=[Interrupts(update=3)], overrides=warmup, exit_code=130)
    run = RunResult(tmp_path / "run")
    assert len(run.events_of("warmup")) < 10
    assert not (run.folder / "metrics.jsonl").read_text()
    cli_resume(run.folder, capsys)
    assert len(run.metrics) == 2


def test_the_installed_command_is_interrupted_and_resumed(tmp_path: Path) -> None:
    """A process of its own, from the shell's point of view."""
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent / "src")))}

    def rollbook(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollbook.cli.main", "train", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    path, marker = write_tiny(tmp_path, num_steps=3), tmp_path / "marker"
    term = {
        "function": "tiny_rewards:interrupts_once",
        "isolation": "inline",
        "is_tested": False,
        "options": {"marker": str(marker)},
    }
    first = rollbook(str(path), "--set", as_set({"reward.terms": [term]})[0])
    said = f"interrupted: `rollbook train --resume {tmp_path / 'run'}` continues\n"
    assert (first.returncode, first.stdout, first.stderr) == (130, "", said)
    second = rollbook("--resume", str(tmp_path / "run"))
    assert (second.returncode, second.stdout, second.stderr) == (0, f"{tmp_path / 'run'}\n", "")
    assert len(RunResult(tmp_path / "run").metrics) == 3
