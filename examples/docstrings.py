"""Write the docstrings of Python's own standard library to a JSONL file: one public name and its text per line."""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
LEFT_OUT = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}


def modules() -> Iterator[tuple[str, Path]]:
    """Name and file of every public module that documents itself in Python."""
    for path in sorted(LIBRARY.rglob("*.py")):
        parts = path.relative_to(LIBRARY).with_suffix("").parts
        if not LEFT_OUT.intersection(parts) and not any(part.startswith("_") and part != "__init__" for part in parts):
            yield ".".join(part for part in parts if part != "__init__"), path


def docstrings(name: str, node: ast.AST) -> Iterator[tuple[str, str]]:
    """Qualified name and docstring of `node` and of every public class and function inside it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if text := ast.get_docstring(node):
            yield name, text
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                yield from docstrings(f"{name}.{child.name}", child)


def collect() -> dict[str, str]:
    """Every docstring by the qualified name it documents."""
    found: dict[str, str] = {}
    for module, path in modules():
        for name, text in docstrings(module, ast.parse(path.read_bytes())):
            found.setdefault(name, text)
    return found


def main(output: Path) -> None:
    found = collect()
    lines = (json.dumps({"name": name, "text": text}, ensure_ascii=False) for name, text in found.items())
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_suffix(".unfinished")
    unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
    unfinished.replace(output)  # a file of that name is always whole
    print(f"{len(found):,} docstrings of Python {sys.version.split()[0]} in {output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
