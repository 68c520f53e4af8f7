"""Write src/headrace/app/keywords.py, the typed keyword arguments of the public functions, from declarations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.app.servers.settings import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.io.sources.selection import Selection
from headrace.jobs.settings import JobSettings, Limits
from headrace.options import Declared, declared
from headrace.serving.limits import ServeLimits

FILE = Path(__file__).resolve().parents[1] / "src" / "headrace" / "app" / "keywords.py"
_HEAD = '''"""The settings of jobs and servers as keywords. Written by scripts/setting_keywords.py: do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from headrace.engines.keywords import EngineKeywords, LocalKeywords

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from headrace.engines.choosing.config import EngineChoice
    from headrace.events import Listener
    from headrace.io.formats.strict_json import OnNan
    from headrace.io.sources.selection import Selection
    from headrace.jobs.settings import FinishFn, Limits, OnEmpty, Order, PrepareFn, WorkerKind
    from headrace.serving.limits import KeySettings, ServeLimits


class ConfigKeywords(LocalKeywords, total=False):
    """Settings of any engine, and the options of those in this process."""

'''
_JOB = '''

class LoadKeywords(ConfigKeywords, EngineKeywords, total=False):
    """Settings of a loaded model."""


class JobKeywords(TypedDict, total=False):
    """Settings of a job, without those of its model."""

    limits: Limits | None
    selection: Selection | None
'''
_WHOLE = '''

class RunKeywords(LoadKeywords, JobKeywords, total=False):
    """Settings of a job."""

    steps: Sequence[Mapping[str, object]] | None
    model_column: str | None
    task: str | None
'''
_SERVED = '''

class ServeOptions(TypedDict, total=False):
    """Settings of a server of a loaded model but its name."""

    limits: ServeLimits | None
'''
_SERVER = '''

class ServeKeywords(ServeOptions, total=False):
    """Settings of a server of a loaded model."""

    name: str | Sequence[str] | None


class ServerOptions(ConfigKeywords, ServeOptions, total=False):
    """Settings of a server but its name."""

'''
_NAME = '''

class ServerKeywords(ServerOptions, EngineKeywords, total=False):
    """Settings of a server."""

    name: str | Sequence[str] | None
'''
_OF_THE_MODEL = ("batch_timeout_s", "state", "latency_target_s")
"""Settings of a server that loads its own model."""
_WIDER = {
    "engine_options": "Mapping[str, object] | None",
    "engine": "str | Callable[..., object] | EngineChoice | None",
    "keep_columns": "Sequence[str]",
    "flatten": "Sequence[str]",
    "state": "str | Path | None",
}
"""What the functions take beside the type of the setting."""
_APART = ("source", "sink", "task", "model", "name")
"""What is a parameter of its own."""


def source() -> str:
    """The file's text."""
    return "".join(
        (
            _HEAD,
            _lines(EngineConfig),
            _JOB,
            _lines(JobSettings, Selection, Limits),
            _WHOLE,
            _SERVED,
            _lines(ServerSettings, ServeLimits, leave_out=_OF_THE_MODEL),
            _SERVER,
            _lines(ServerSettings, only=_OF_THE_MODEL),
            _NAME,
        )
    )


def _lines(*kinds: type, leave_out: Sequence[str] = (), only: Sequence[str] = ()) -> str:
    every = [(one, kind.__dataclass_fields__[one.name].type) for kind in kinds for one in declared(kind)]  # type: ignore[attr-defined]
    return "".join(
        f"    {one.name}: {_type(one, kind)}\n"
        for one, kind in every
        if one.name not in (*_APART, *leave_out) and (not only or one.name in only)
    )


def _type(one: Declared, kind: str) -> str:
    """What the functions take for a setting, also the text of a flag if that is read in a way of its own."""
    found = _WIDER.get(one.name, kind)
    return found if one.option.parse is None else f"str | {found}"


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
