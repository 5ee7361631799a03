"""What the layout of the code promises: which way imports point, what stays light, what is documented."""

from __future__ import annotations

import ast
import functools
import importlib
import pickle
import pkgutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import rollbook
from rollbook.config.run_config import RunConfig
from rollbook.errors import RunError
from rollbook.observe.catalogue import STAGES
from rollbook.observe.events import EVENT_KINDS
from rollbook.observe.terminal import PHASES

ROOT = Path(rollbook.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


STEPS = [
    {"types", "weights", "kernels", "errors", "section", "observe"},
    {"ledger", "algos", "envs", "modeling", "checkpoint"},
    {"rollout", "buffer", "trainer", "sync", "memory", "planner", "diagnose"},
    {"config"},
    {"cluster"},
    {"controller", "drill"},
    {"cli"},
]
"""A folder imports from steps before its own; `observe` from the rest of the first step."""

ALLOWED_BESIDE = {
    ("observe", "types"),
    ("observe", "errors"),
    ("observe", "section"),
    ("types", "errors"),
    ("drill", "controller"),
}
ALLOWED_UP = {
    ("config", "cluster.config"): "a section",
    ("config", "controller.config"): "sections",
    ("config", "controller.schedule"): "data: what a schedule is, for the checks of its relations",
    ("rollout/vllm", "sync"): "the worker inside vLLM's process is the replica's side of the transaction",
}
"""(from, to) -> why."""


def imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports anywhere, without the package's name."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module == "rollbook":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rollbook."):
            yield node.module.removeprefix("rollbook.")
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("rollbook.") for a in node.names if a.name.startswith("rollbook.")
            )


def step_of(folder: str) -> int:
    found = [number for number, folders in enumerate(STEPS) if folder in folders]
    assert found, f"{folder} has no place in STEPS"
    return found[0]


def test_imports_point_one_way() -> None:
    wrong = []
    for path in FILES:
        place = path.relative_to(ROOT).with_suffix("").as_posix()
        folder = place.partition("/")[0]
        if folder == "__init__":
            continue
        for module in imports(path):
            to = module.partition(".")[0]
            is_allowed = to == folder or (folder, to) in ALLOWED_BESIDE or step_of(to) < step_of(folder)
            is_allowed |= any(
                place.startswith(start) and (module == end or module.startswith(f"{end}."))
                for start, end in ALLOWED_UP
            )
            if not is_allowed:
                wrong.append(f"{place} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_planner_and_diagnosis_stand_on_the_ledger_alone() -> None:
    for path in [*(ROOT / "planner").rglob("*.py"), *(ROOT / "diagnose").rglob("*.py")]:
        folders = {module.partition(".")[0] for module in imports(path)}
        assert folders <= STEPS[0] | {"ledger", "planner", "diagnose"}, path


def test_folders_that_work_without_torch_do() -> None:
    """Every config.py, and all of ledger, planner, buffer and diagnose."""
    light = [
        path.relative_to(ROOT.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in FILES
        if path.relative_to(ROOT).parts[0] in ("ledger", "planner", "buffer", "diagnose")
        or path.name == "config.py"
        or path.parent.name == "config"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'ray', 'vllm'} & sys.modules.keys()\n"
        "    assert not heavy, (name, heavy)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize(
    ("package", "place"), [("ray", "cluster/"), ("vllm", "rollout/vllm/"), ("peft", "trainer/")]
)
def test_a_heavy_package_is_imported_in_one_place(package: str, place: str) -> None:
    for path in FILES:
        for node in nodes(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            if any(name.partition(".")[0] == package for name in names):
                assert path.relative_to(ROOT).as_posix().startswith(place), path


def test_a_folder_says_in_one_paragraph_what_it_owns_and_imports_nothing() -> None:
    for path in ROOT.rglob("__init__.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstring = ast.get_docstring(tree)
        assert docstring, path
        rest = tree.body[1:]
        assert not rest or path == ROOT / "__init__.py", path
    assert not list(ROOT.rglob("utils.py"))


UNPICKLING_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNPICKLING_CALLS = {
    ("torch", "load"),
    ("np", "load"),
    ("dist", "broadcast_object_list"),
    ("dist", "all_gather_object"),
    ("dist", "gather_object"),
    ("dist", "scatter_object_list"),
}


def test_nothing_unpickles_what_it_was_given() -> None:
    """BR-132: no module that could make code of the bytes of a message or a file is imported, and no such call made.
    What Ray carries is Ray's (docs/architecture.md says so)."""
    found = []
    for path in FILES:
        for node in nodes(path):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value).rpartition(".")[2]
                owner = {"numpy": "np", "distributed": "dist"}.get(owner, owner)
                if (owner, node.func.attr) in UNPICKLING_CALLS:
                    found.append(f"{path.name}:{node.lineno}")
            if UNPICKLING_MODULES & set(names):
                found.append(f"{path.name}:{node.lineno}")
    assert not found


def sections(section: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """A section and all those inside it, through unions, tuples and dicts."""
    if section not in seen:
        seen.add(section)
        todo = [field.annotation for field in section.model_fields.values()]
        while todo:
            annotation = todo.pop()
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                sections(annotation, seen)
            else:
                todo += typing.get_args(annotation)
    return seen


def test_every_config_field_is_documented() -> None:
    found = sections(RunConfig, set())
    assert len(found) > 15
    missing = [
        f"{section.__name__}.{name}"
        for section in found
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert not missing


def errors(base: type[RunError]) -> set[type[RunError]]:
    return {base}.union(*(errors(child) for child in base.__subclasses__()))


def test_every_error_survives_pickling_and_keeps_its_remedy() -> None:
    for module in pkgutil.walk_packages([str(ROOT)], "rollbook."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:  # an extra that is not installed
            assert not (error.name or "").startswith("rollbook"), module.name
    found = errors(RunError)
    assert len(found) > 12
    for kind in found:
        error = pickle.loads(pickle.dumps(kind("step 3 has 0 groups", "look at the filters")))
        assert type(error) is kind
        assert (error.what, error.remedy) == ("step 3 has 0 groups", "look at the filters")
        assert str(error) == "step 3 has 0 groups\nhint: look at the filters"


def literal_calls(method: str) -> Iterator[tuple[Path, str]]:
    """First argument of every call `something.method("...")`."""
    for path in FILES:
        for node in nodes(path):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == method
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str)
            ):
                yield path, node.args[0].value


def test_every_event_and_stage_of_the_loop_is_listed() -> None:
    kinds = [(path, kind) for path, kind in literal_calls("event")]
    assert len(kinds) > 10
    for path, kind in kinds:
        assert kind in EVENT_KINDS, (path, kind)
    stages = [name for path, name in literal_calls("span") if path.parent.name == "controller"]
    assert len(stages) > 10
    assert set(stages) <= STAGES.keys() | PHASES.keys()


def test_environment_variables_are_read_in_config_alone() -> None:
    """The settings that vLLM takes only from the environment are written there, not read."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                assert path.relative_to(ROOT).as_posix().startswith(("config/", "rollout/vllm/")), path
