"""Write src/headrace/engines/keywords.py, the options of all engines as typed keywords, from their declarations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from headrace.engines.choosing.registry import declared_engines
from headrace.engines.declaring import EngineOptions
from headrace.options import declared
from headrace.plugins import OWN, known

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "src" / "headrace" / "engines" / "keywords.py"
_HEAD = '''"""The options of all engines as typed keywords. Written by scripts/engine_options.py: do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Literal

    from headrace.engines.options import ChunkJoin, OutputDtype, PixelsOption, Quantize, TooLong
    from headrace.engines.text.options import TokenVectorDtype


class LocalKeywords(TypedDict, total=False):
    """Options of engines that run a model in this process."""

'''
_REMOTE = '''

class EngineKeywords(LocalKeywords, total=False):
    """Options of all engines; each refuses what it does not have."""

'''


def own_engines() -> list[type[EngineOptions]]:
    """Headrace's own."""
    plugins = known("engines")
    return [kind for kind in declared_engines() if plugins[f"{kind.task}.{kind.engine}"].package == OWN]


def source() -> str:
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


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
