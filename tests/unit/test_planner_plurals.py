"""One of a thing is told in the singular, and two in the plural, in everything that a plan of a small job prints."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from rollbook.cli.main import main

_THINGS = (
    "GPU", "node", "step", "replica", "slot", "sequence", "trajectory", "prompt", "response", "group", "wave", "turn",
    "call", "update", "core", "sandbox", "publication", "topology", "bucket", "tensor", "name", "process", "stage",
    "version", "batch", "layer", "token", "copy", "model", "epoch", "rank", "engine", "line", "minute", "column",
)  # fmt: skip
_PLURALS = "|".join(re.sub("y$", "ie", t) + ("es" if t.endswith(("x", "ss", "ch")) else "s") for t in _THINGS)
_ONE_OF_MANY = re.compile(rf"(?<![\w.,:×/-])1 (?:[a-z]+ )?(?:{_PLURALS})\b")
_MANY_OF_ONE = re.compile(
    rf"(?<![\w.,:×/-])(?<!step )(?:0|[2-9]|[1-9]\d+) (?:shared |training |rollout )?(?:{'|'.join(_THINGS)})\b(?! hour)"
)
_OPTIONS: list[list[str]] = [
    [],
    ["--prompts", "1", "--group-size", "2"],
    ["--prompts", "1", "--group-size", "1", "--max-staleness", "0"],
    ["--turns", "2", "--env-seconds", "1", "--horizon", "1"],
    ["--checkpoint-every", "1", "--rollout-tp", "1"],
    ["--assume", "paper"],
    ["--model", "DeepSeek-V3"],
]


def _slips(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " | ", text))
    found = [*_ONE_OF_MANY.finditer(text), *_MANY_OF_ONE.finditer(text)]
    return [text[max(match.start() - 40, 0) : match.end() + 20] for match in found]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("COLUMNS", "400")

    def run(*args: str) -> str:
        with contextlib.suppress(SystemExit):  # what is refused is told, too
            main(list(args))
        out = capsys.readouterr()
        return out.out + out.err

    return run


@pytest.mark.parametrize(
    ("num_gpus", "options"),
    [*(("1", options) for options in _OPTIONS), ("3", []), ("3", ["--assume", "paper"])],
)
def test_a_plan_counts_as_a_person_does(printed, tmp_path: Path, num_gpus: str, options: list[str]) -> None:  # type: ignore[no-untyped-def]
    job = [
        "--model",
        "Qwen3-0.6B",
        "--response-tokens",
        "64",
        "--max-response-tokens",
        "128",
        "--num-gpus",
        num_gpus,
    ]
    html, toml = tmp_path / "report.html", tmp_path / "run.toml"
    texts = [
        printed("plan", *job, *options, "--html", str(html)),
        printed("plan", *job, *options, "-o", str(toml)),
    ]
    texts += [printed("plan", *job, *options, "--emit", kind) for kind in ("verl", "ray")]
    if "--horizon" not in options and "--checkpoint-every" not in options:
        texts.append(printed("simulate", *job, *options, "--steps", "2"))
    texts += [path.read_text() for path in (html, toml) if path.exists()]
    assert [slip for text in texts for slip in _slips(text)] == []


def test_the_sweep_sees_a_slip() -> None:
    assert _slips("a split of 8:1 on 1 GPUs, 3 step and 2 shared GPU, 1 open sandboxes")
    assert not _slips("8:1 GPUs, 1 GPU, 2 GPU hours, 11 steps, v1 steps, 0.1 steps, step 3 step 4")
