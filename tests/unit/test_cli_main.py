"""The command line as a whole: help without imports, exit codes, and what a user's mistake looks like."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rollbook.cli import main as cli
from rollbook.errors import ConfigError


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rollbook.cli.main", *args], capture_output=True, text=True)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command of the test's own, called "probe"."""
    module = types.ModuleType("rollbook.cli.probe")
    monkeypatch.setitem(sys.modules, "rollbook.cli.probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("probe", "A command of this test."))
    monkeypatch.setattr(cli, "_exists", lambda name: name == "probe")
    return module


def exit_code(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(args))
    return int(caught.value.code or 0)


def test_help_lists_every_command_that_is_there() -> None:
    text = run("--help").stdout
    for name, (file, line) in cli.COMMANDS.items():
        assert (f"  {name}" in text) == (Path(cli.__file__).parent / f"{file}.py").exists()
        assert line.endswith(".")
    assert run().stdout == text


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from rollbook.cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.split()
    assert not set(loaded) & {"typer", "rich", "pydantic", "numpy", "torch", "transformers", "pyarrow"}


def test_version() -> None:
    assert run("--version").stdout.startswith("rollbook 0.")


def test_an_unknown_command_names_the_nearest() -> None:
    answer = run("wach")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr == "error: there is no command 'wach'\nhint: did you mean 'watch'?\n"


def test_a_users_mistake_is_two_lines_and_exit_code_2(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(steps: int = 1) -> None:
        raise ConfigError(f"num_steps is {steps}", "use 1 or more")

    command.command = fails
    assert exit_code("probe", "--steps", "0") == 2
    assert capsys.readouterr().err == "error: num_steps is 0\nhint: use 1 or more\n"


def test_ctrl_c_is_exit_code_130_without_a_traceback(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    command.command = interrupted
    assert exit_code("probe") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_our_own_mistake_keeps_its_traceback(command: types.ModuleType) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    command.command = broken
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_a_wrong_option_is_usage_and_exit_code_2(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def takes(steps: int = 1) -> None:
        print(steps)

    command.command = takes
    assert exit_code("probe", "--stebs", "3") == 2
    assert "No such option" in capsys.readouterr().err
    assert exit_code("probe", "--steps", "3") == 0
    assert capsys.readouterr().out == "3\n"


def test_a_closed_pipe_ends_quietly() -> None:
    code = (
        "import sys, types\nfrom rollbook.cli import main as cli\n"
        "def command() -> None:\n    for i in range(200_000):\n        print(i)\n"
        "module = types.ModuleType('rollbook.cli.probe'); module.command = command\n"
        "sys.modules['rollbook.cli.probe'] = module\n"
        "cli.COMMANDS['probe'] = ('probe', ''); cli._exists = lambda name: True\ncli.main(['probe'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_commands_help_is_a_sentence_an_example_and_options(name: str) -> None:
    if not cli._exists(name):
        pytest.skip("not part of this installation")
    answer = run(name, "--help")
    assert answer.returncode == 0, answer.stderr
    assert f"Usage: rollbook {name}" in answer.stdout
    assert f"rollbook {name}" in answer.stdout.split("Usage:")[1].split("\n", 1)[1], (
        "an example that can be pasted"
    )


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_an_example_reads_what_the_demo_or_the_repository_has(name: str) -> None:
    if not cli._exists(name):
        pytest.skip("not part of this installation")
    module = importlib.import_module(f"rollbook.cli.{name.replace('-', '_')}")
    example = re.search(r"Example: (.+)", module.command.__doc__)
    assert example is not None
    for path in re.findall(r"(?:runs|examples)/\S+", example[1]):
        if path.startswith("examples/"):
            assert (Path(__file__).parents[2] / path).is_file()
        else:
            assert path == "runs/reverse" and "`rollbook demo` makes runs/reverse" in module.command.__doc__
