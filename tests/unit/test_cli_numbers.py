"""No number that a person can type ends in a traceback: senseless ones are refused with value and remedy."""

from __future__ import annotations

import inspect
import json
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.cli import plan as plan_command
from rollbook.cli import simulate as simulate_command
from rollbook.cli.main import main

NOT_NUMBERS = ("nan", "inf", "-inf")
COUNTS = (
    "num-gpus", "prompts", "group-size", "prompt-tokens", "response-tokens", "max-response-tokens",
)  # fmt: skip
COUNTS_OR_ZERO = ("observation-tokens", "max-context", "reward-tokens", "prefill-chunk")
INTEGERS = {  # option -> values that cannot be meant
    "gpus-per-node": ("-3", "-1", "2000"),
    "mini-batches": ("0", "-2", "1e3"),
    "rollout-tp": ("-1", "3000"),
    "max-staleness": ("-1", "5000"),
    "lora-rank": ("-1", "1e3", "99999"),
    "epochs": ("0", "-1", "1e3"),
    "sleep-level": ("-1", "3", "1e3"),
}
FLOATS = {
    "host-gb-per-gpu": ("-1", "1e300"),
    "length-sigma": ("-0.1", "99", "1e300"),
    "turns": ("0", "-2", "0.5", "1e300"),
    "env-seconds": ("-5", "1e300"),
    "env-p50-seconds": ("-5", "1e300", "3"),  # three seconds, where the mean is zero
    "env-p99-seconds": ("-5", "1e300", "3"),
    "sandbox-start-seconds": ("-1", "1e300"),
    "cores-per-sandbox": ("-1", "0", "1e300"),
    "gb-per-sandbox": ("-1", "0", "1e300"),
    "changed-frac": ("-0.1", "1.1"),
    "lend": ("-1",),
    "length-growth": ("-1", "9"),
}
PLAN_ONLY = {
    "top": ("0", "-1", *NOT_NUMBERS),
    "checkpoint-every": ("-1", "1e3", "9999999", *NOT_NUMBERS),
    "storage-gb-per-s": ("-1", "1e300", *NOT_NUMBERS),
    "horizon": ("-1", "0", "1e3", *NOT_NUMBERS),
}
SIMULATE_ONLY = {
    "steps": ("-1", "1e9", "99999999"),
    "seed": ("-1",),
    "sync-every": ("0", "-1"),
    "failure-frac": ("-0.1", "1", "2", "nan", "inf"),
    "replica-mtbf-hours": ("-1", "nan", "inf"),
    "replica-recovery-seconds": ("-1", "nan", "inf"),
}


def cases() -> list[tuple[str, str, str]]:
    """(command, option, value) of everything that must be refused."""
    shared = [
        (name, value) for name in COUNTS for value in ("0", "-3", "1.5e-9", "1e30", "0.3", *NOT_NUMBERS)
    ]
    shared += [(name, value) for name in COUNTS_OR_ZERO for value in ("-3", "1e30", "0.3", *NOT_NUMBERS)]
    shared += [(name, value) for name, values in INTEGERS.items() for value in (*values, *NOT_NUMBERS)]
    shared += [(name, value) for name, values in FLOATS.items() for value in (*values, *NOT_NUMBERS)]
    shared += [("split", value) for value in ("0:8", "-1:9", "4:99", "nan:4", "4:", "1e3:2")]
    only_plan = [(name, value) for name, values in PLAN_ONLY.items() for value in values]
    only_simulate = [(name, value) for name, values in SIMULATE_ONLY.items() for value in values]
    return [
        *(("plan", *case) for case in shared + only_plan),
        *(("simulate", *case) for case in shared + only_simulate),
    ]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


@pytest.mark.parametrize(("command", "option", "value"), cases())
def test_a_number_that_cannot_be_meant_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, option: str, value: str
) -> None:
    code, out, err = run(capsys, command, "--model", "qwen3-0.6b", f"--{option}={value}")
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err and len(err) < 1000
    if err.startswith("error: "):  # else the parser refused its type, and names the option itself
        assert "\nhint: " in err and not err.rstrip().endswith("hint:")
    else:
        assert f"--{option}" in err


def test_the_table_covers_every_number_option() -> None:
    """A new option must say which of its values are senseless."""
    told = {*COUNTS, *COUNTS_OR_ZERO, *INTEGERS, *FLOATS, *PLAN_ONLY, *SIMULATE_ONLY, "split"}
    words = "model gpu lengths algorithm reward reference proximal rollout-dtype offload assume output html emit json"
    words += " mode take on-stale on-publish recompute-kv recompute keep-prefix lora-publish checkpoint-async"
    words += " reward-model share-prompts stack rebuild-engine engine idle-state"
    for command in (plan_command.command, simulate_command.command):
        signature = inspect.signature(command, eval_str=True)
        for parameter in signature.parameters.values():
            option: Any = get_args(parameter.annotation)[-1]
            assert str(option.default).removeprefix("--").split("/")[0] in told | set(words.split()), (
                parameter.name
            )


NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "8",
    "16",
    "64",
    "1000",
    "8k",
    "1e6",
    "0.5",
    "-1",
    "nan",
    "inf",
    "1e300",
    "",
    "x",
]
OPTIONS = [*COUNTS, *COUNTS_OR_ZERO, *INTEGERS, *FLOATS]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.dictionaries(st.sampled_from(OPTIONS), st.sampled_from(NUMBERS), max_size=6),
    model=st.sampled_from(["qwen3-0.6b", "qwen3-30b-a3b", "deepseek-v3"]),
    extra=st.sampled_from([[], ["--algorithm", "ppo"], ["--reward", "generative"], ["--assume", "paper"]]),
)
def test_any_combination_of_numbers_is_an_answer_or_a_refusal(
    capsys: pytest.CaptureFixture[str], chosen: dict[str, str], model: str, extra: list[str]
) -> None:
    args = [f"--{option}={value}" for option, value in chosen.items()]
    code, out, err = run(capsys, "plan", "--model", model, *extra, *args, "--json")
    assert "Traceback" not in err
    if code == 1:  # an answer too: nothing fits
        assert json.loads(out)["recommendation"]["mode"] is None
    assert (code < 2 and "nan" not in out.lower().replace("nanos", "")) or (code == 2 and out == ""), err


SMALL = [f"--{name}={value}" for name, value in {
    "prompts": 4, "group-size": 2, "response-tokens": 64, "prompt-tokens": 16, "steps": 3}.items()]  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.dictionaries(
        st.sampled_from([*INTEGERS, *FLOATS, *SIMULATE_ONLY]),
        st.sampled_from(NUMBERS[:10] + NUMBERS[11:]),
        max_size=5,
    ),
    mode=st.sampled_from(["sync", "colocate_async", "separate_sync", "separate_async"]),
    words=st.sampled_from([[], ["--take", "arrival"], ["--on-publish", "abort"], ["--recompute-kv"]]),
)
def test_any_simulation_ends_with_numbers_or_a_refusal(
    capsys: pytest.CaptureFixture[str], chosen: dict[str, str], mode: str, words: list[str]
) -> None:
    args = [
        f"--{option}={value}" for option, value in chosen.items() if option != "steps" or value in ("0", "3")
    ]
    code, out, err = run(
        capsys, "simulate", "--model", "qwen3-0.6b", "--mode", mode, *SMALL, *words, *args, "--json"
    )
    assert "Traceback" not in err
    assert code == 0 or (code == 2 and out == ""), err
