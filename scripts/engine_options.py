"""Write what follows from the declarations of the engines: their options as typed keywords, and the table in the docs.

src/headrace/engines/keywords.py    docs/engine-options.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from headrace.engines.choosing.registry import declared_engines, engine_options
from headrace.engines.declaring import EngineOptions
from headrace.engines.vllm.options import AS_VLLM as VLLM
from headrace.options import Declared, declared
from headrace.plugins import OWN, known
from headrace.wording import spelled

ROOT = Path(__file__).resolve().parents[1]
KEYWORDS = ROOT / "src" / "headrace" / "engines" / "keywords.py"
TABLE = ROOT / "docs" / "engine-options.md"
_HEAD = '''"""The options of all engines as typed keywords. Written by scripts/engine_options.py: do not edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from headrace.engines.options import ChunkJoin, OutputDtype, Quantize, TooLong
from headrace.engines.text.options import TokenVectorDtype


class LocalKeywords(TypedDict, total=False):
    """Options of engines that run a model in this process."""

'''
_REMOTE = '''

class EngineKeywords(LocalKeywords, total=False):
    """Options of all engines; each refuses what it does not have."""

'''
_PAGE = """# Options of engines

<!-- Written by scripts/engine_options.py from the declarations of the engines: do not edit. -->

Each is a flag of `headrace run`, `serve`, `retry` and `tune`, a keyword of `headrace.run` and `build_app`, a key of
`engine_options` in files, and a field of the engine's class, such as `headrace.Embedding`. An engine refuses what it
does not have. The engine `vllm` takes all arguments of vLLM's own `EngineArgs` too. [engines.md](engines.md) says more
about most of them.

| flag | engines | default | meaning |
|---|---|---|---|
"""


def own_engines() -> list[type[EngineOptions]]:
    """Headrace's own."""
    plugins = known("engines")
    return [kind for kind in declared_engines() if plugins[f"{kind.task}.{kind.engine}"].package == OWN]


def keywords() -> str:
    """The text of the module."""
    types: dict[str, dict[str, None]] = {}
    local: set[str] = set()
    for kind in own_engines():
        for option in declared(kind):
            written = str(kind.__dataclass_fields__[option.name].type)
            types.setdefault(option.name, {}).update(dict.fromkeys(re.split(r" \| (?![^\[]*\])", written)))
        if not kind.remote:
            local.update(option.name for option in declared(kind))
    lines = {name: f"    {name}: {_joined(found)}\n" for name, found in sorted(types.items())}
    here = "".join(line for name, line in lines.items() if name in local)
    return _HEAD + here + _REMOTE + "".join(line for name, line in lines.items() if name not in local)


def _joined(parts: Iterable[str]) -> str:
    return " | ".join(sorted(parts, key=lambda part: part == "None")).replace("'", '"')


def table() -> str:
    """The text of the page."""
    return _PAGE + "".join(_row(name) for name in sorted(engine_options()) if any(_having(name)))


def _row(name: str) -> str:
    having = list(_having(name))
    options = [next(one for one in declared(kind) if one.name == name) for kind in having]
    defaults = dict.fromkeys(_shown(one) for one in options)
    helps = dict.fromkeys(spelled(one.option.help, "flags").removesuffix(".") for one in options)
    meaning = "; ".join(words for words in helps if len(helps) == 1 or words != VLLM.removesuffix("."))
    return f"| `{options[0].flags[0]}` | {_engines(having)} | {', '.join(filter(None, defaults))} | {meaning} |\n"


def _shown(one: Declared) -> str:
    if one.required or one.default in (None, "", ()):
        return ""
    return str(one.default).lower() if isinstance(one.default, bool) else str(one.default)


def _having(name: str) -> Iterable[type[EngineOptions]]:
    return (kind for kind in own_engines() if any(one.name == name for one in declared(kind)))


def _engines(having: list[type[EngineOptions]]) -> str:
    """The engines by name, with their tasks if not all of them."""
    tasks: dict[str, list[str]] = {}
    for kind in having:
        tasks.setdefault(kind.engine, []).append(kind.task)
    every = [kind.engine for kind in own_engines()]
    return "; ".join(
        f"`{engine}`" + ("" if len(found) == every.count(engine) else f" ({', '.join(found)})")
        for engine, found in tasks.items()
    )


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
    TABLE.write_text(table(), encoding="utf-8")
