"""The shape of the house: what may be imported where, and what a plain install brings."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "headrace"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    """All nodes of a module."""
    return list(ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))))


def imports(module: str) -> set[str]:
    """Top-level names of everything a module imports, also inside functions."""
    names: set[str] = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_importing_headrace_brings_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import headrace\n"
        "jobs = ('LoadedModel', 'RunningJob', 'arun', 'load', 'run')\n"
        "[getattr(headrace, name) for name in headrace.__all__ if name not in jobs]\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names - {'headrace'}))"
    )
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{code}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_job_over_local_files_imports_no_client_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "one"}\n')
    code = (
        "import sys, headrace\n"
        "for _ in range(2):  # the second run reads the state of the first\n"
        "    headrace.run('in.jsonl', sink='out.jsonl', engine='headrace.testing:FakeEngine', progress=False)\n"
        "print(sorted({'aiohttp', 'botocore', 'huggingface_hub', 's3fs', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_batching_is_written_on_the_standard_library() -> None:
    own = sys.stdlib_module_names | {"headrace"}
    assert [name for name in MODULES if name.startswith("batching/") and not imports(name) <= own] == []


def test_heavy_libraries_are_imported_in_their_own_room() -> None:
    heavy = {"torch", "transformers", "sentence_transformers", "tokenizers"}
    elsewhere = [name for name in MODULES if not name.startswith(("engines/", "device/"))]
    assert [name for name in elsewhere if imports(name) & heavy] == []


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring, which may be long."""
    docstring = ast.get_docstring(node, clean=False)
    return (node.end_lineno or 0) - node.lineno + 1 - (len(docstring.split("\n")) if docstring else 0)


def test_no_function_is_long() -> None:
    long = [
        f"{module}:{node.name}"
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > 60
    ]
    assert long == []


MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")


def test_the_map_has_one_line_for_every_folder() -> None:
    named = re.findall(r"^\| `([\w/]+/)` \|", MAP, flags=re.MULTILINE)
    assert sorted(named) == sorted(name.removesuffix("__init__.py") for name in MODULES if name.count("/__init__.py"))


def test_the_files_on_the_map_are_there() -> None:
    known = [f"/{name}" for name in (*MODULES, *(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")))]
    named = sorted(set(re.findall(r"`([\w/]+\.py)`", MAP)))
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in known)] == []


def test_durations_never_come_from_the_wall_clock() -> None:
    forbidden = re.compile(r"\btime\.time(_ns)?\(")
    assert [name for name in MODULES if forbidden.search((PACKAGE / name).read_text(encoding="utf-8"))] == []


KINDS = re.compile(r"\b\w*Engine$")


def reads_an_engine(node: ast.AST) -> bool:
    """Whether an expression is an engine: `engine`, `self._engine`, `job.engine` and so on."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_") == "engine"


def guesses_about_engines(nodes: list[ast.AST]) -> list[int]:
    """Lines that ask an engine for its type, or for what it may not have, instead of reading its profile."""
    lines = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr == "profile" and reads_an_engine(node.value):
            lines.append(node.lineno)  # an engine of the user's may have none: `profile_of` knows what to do
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
            subject, other = node.args[:2]
            kinds = [name for name in ast.walk(other) if isinstance(name, ast.Name | ast.Attribute)]
            named = any(KINDS.search(name.id if isinstance(name, ast.Name) else name.attr) for name in kinds)
            asked = reads_an_engine(subject) and (isinstance(other, ast.Constant) or len(node.args) > 2)
            if (node.func.id == "isinstance" and named) or (node.func.id in ("getattr", "hasattr") and asked):
                lines.append(node.lineno)
    return lines


def test_only_the_profile_knows_what_an_engine_may_not_say() -> None:
    others = [name for name in MODULES if name not in ("engines/profile.py", "engines/capabilities.py")]
    assert {name: lines for name in others if (lines := guesses_about_engines(nodes_of(name)))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(engine, StepEngine)",
        "isinstance(job.engine, (base.StreamEngine, StepEngine))",
        "getattr(self._engine, 'pads', False)",
        "getattr(engine, 'max_model_len')",
        "getattr(engine, name, None)",
        "hasattr(engine, 'follow')",
        "self.engine.profile",
    ],
)
def test_a_guess_about_an_engine_is_found(line: str) -> None:
    assert guesses_about_engines(list(ast.walk(ast.parse(line)))) == [1]


SHORT = re.compile(
    r"\.(wait|join|result|communicate)\((timeout=)?([2-9]|[1-5]\d)\b"  # a wait that a busy machine may not keep
    r"|(monotonic|perf_counter)\(\) - \w+ <=? \d\d?\b"
    r"|httpx\.(get|post|stream|Client|AsyncClient)\((?!.*timeout=)"  # by default five seconds
)


def test_no_test_fails_because_the_machine_is_busy() -> None:
    """A limit against hanging is a minute or more; what is quick is shown by events, counts or a clock of its own."""
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if SHORT.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("    assert process.wait({}) == 0", "3"),
        ("    said = job.communicate(timeout={})", "10"),
        ("    assert time.monotonic() - began < {}", "5"),
        ("    httpx.{}(url)", "get"),
    ],
)
def test_a_wait_that_is_too_short_is_found(line: str, short: str) -> None:
    assert SHORT.search(line.format(short))
    assert not SHORT.search(line.format("120").replace("(url)", "(url, timeout=60)"))


DOTTED = re.compile(r"`(?:headrace\.)?([a-z_]+(?:\.[A-Za-z_]+)+)[`(]")


def names_that_are_gone(module: str) -> list[str]:
    """Names in docstrings such as `jobs.state.ledger.Ledger`, of which the module or the next word in it is not there.

    A package names its own modules.
    """
    path, gone = PACKAGE / module, []
    for name in DOTTED.findall(path.read_text(encoding="utf-8")):
        folder, parts = path.parent if module.endswith("/__init__.py") else PACKAGE, name.split(".")
        known = (folder / parts[0] / "__init__.py").exists() or (folder / f"{parts[0]}.py").exists()
        while parts and (folder / parts[0] / "__init__.py").exists():
            folder /= parts.pop(0)
        file = folder / "__init__.py"
        if parts and (folder / f"{parts[0]}.py").exists():
            file = folder / f"{parts.pop(0)}.py"
        if known and parts and not re.search(rf"\b{parts[0]}\b", file.read_text(encoding="utf-8")):
            gone.append(name)
    return gone


def test_the_modules_that_docstrings_name_are_there() -> None:
    assert {module: gone for module in MODULES if (gone := names_that_are_gone(module))} == {}
