"""Settings of a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, cast

from headrace.argument_types import check_types
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError
from headrace.events import Listener
from headrace.io.formats.strict_json import OnNan
from headrace.io.sinks.callback_sink import Receiver, Rows
from headrace.io.sources.selection import Selection
from headrace.io.storage.addresses import is_address, without_password
from headrace.io.storage.locations import anchored as anchored_path
from headrace.records import JsonObject
from headrace.wording import shown

WorkerKind: TypeAlias = Literal["auto", "thread", "process"]
PrepareFn: TypeAlias = Callable[[Any], object]
"""`(row) -> row`; a user annotates the row with a type of choice."""
FinishFn: TypeAlias = Callable[[Any, Any], object]
"""`(row, output) -> output`."""
OnEmpty: TypeAlias = Literal["keep", "error"]
"""What to do with an input that is an empty text: process it, or fail its record."""
Order: TypeAlias = Literal["auto", "prefix", "input"]
"""The order of work: by common beginnings of prompts, as in the input, or whichever the prompts suggest."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which records a step computes, where each names its model in a column."""

    column: str
    model: str
    """The name of the step's own model."""
    models: tuple[str, ...]
    """The names of all models of the job."""


@dataclass(frozen=True, slots=True)
class EarlierStep:
    """A step that a later one takes outputs from."""

    name: str
    column: str
    output: str
    """The file with its outputs."""
    facts: JsonObject = field(default_factory=dict)
    """What determines its outputs, as JSON."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What makes a job one step of several."""

    name: str
    column: str
    """Of its output."""
    begun: str
    """Changes when all steps are started again, so that no step continues with outputs of another start."""
    earlier: tuple[EarlierStep, ...] = ()
    choice: ModelChoice | None = None
    """Which records it computes; None for all."""
    is_last: bool = False
    """Whether it writes the output of the whole job."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a job. None of them changes the output."""

    max_error_rate: float = 0.5
    """Stop when more than this fraction of records has failed; checked after a tenth of the input and at its end."""
    max_errors: int | None = None
    """Stop when more than this number of records has failed, in all runs; None for no limit."""
    max_attempts: int = 4
    """Maximum attempts for a record with a transient failure."""
    retry_wait_s: float = 0.5
    """Maximum seconds before the second attempt; doubles for each later one."""
    workers: int | None = None
    """Chunks prepared at once; None to tune it, up to the number of cores."""
    buffer_memory: int = 512_000_000
    """Maximum bytes of rows and outputs in memory, from reading to writing; reading waits at the limit."""
    part_records: int = 4096
    """Rows of a part."""
    commit_interval_s: float = 2.0
    """Maximum seconds before a finished row is committed: the work that a kill may lose."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings of a job."""

    source: object
    """A file, folder, glob or address, "-" for stdin, or rows: see `headrace.io.sources.opening.open_source`."""
    sink: str | Path | Receiver | Rows
    """A file, a folder of parts (see `headrace.io.sinks.targets.find_target`), or a function called with lists of rows
    (see `headrace.io.sinks.callback_sink.CallbackWriter`)."""
    config: EngineConfig = field(default_factory=EngineConfig)
    """Task, model and engine."""
    text_column: str | None = None
    """Input column; None for "text", or "image" for an image task."""
    text_pair_column: str | None = None
    """The second text of a pair: what a cross-encoder scores the first with."""
    id_column: str | None = None
    """None for the column "id" if it exists, else the record's position."""
    prompt_template: str | None = None
    """Template that builds the text from columns, such as "Q: {question}"."""
    keep_columns: tuple[str, ...] = ()
    """Columns copied to the output."""
    on_nan: OnNan = "null"
    """Write NaN and infinities in JSON as null, or fail the record."""
    on_empty: OnEmpty = "keep"
    """Process an empty text, such as an empty cell of a CSV file, or fail the record."""
    selection: Selection = field(default_factory=Selection)
    """Which rows of the input are processed."""
    input_format: str | None = None
    """For names that do not show the format: see `headrace.io.formats.known.known_formats`."""
    output_format: str | None = None
    sql: str | None = None
    """The query whose rows are the input, if the source is a database."""
    limits: Limits = field(default_factory=Limits)
    overwrite: bool = False
    """Start again and replace an existing output."""
    ignore_changes: bool = False
    """Continue although settings have changed; finished records stay as they are."""
    retry: bool = False
    """Process only the failed records of the finished job."""
    prepare: PrepareFn | str | None = None
    """`(row) -> row`, or `module:function`: called for each row before its columns are read."""
    finish: FinishFn | str | None = None
    """`(row, output) -> output`, or `module:function`: called for each output before it is written."""
    worker_kind: WorkerKind = "auto"
    """Whether these run on threads or in processes; "auto" measures their cost."""
    dedupe: bool | None = None
    """Compute equal inputs only once; each record is still written. None for requests that are answered greedily."""
    order: Order = "auto"
    """The order of work: "prefix" puts prompts that begin alike together, "input" keeps the order of the input, "auto"
    chooses by the prompts. The output is in the order of the input in any case."""
    step: StepSettings | None = None
    """For one step of several: see `app.jobs.steps`."""
    trace: str | Path | None = None
    """A file for a trace of the run, for Perfetto; None for none."""
    listeners: Sequence[Listener] = ()
    """Functions that are called with each event of `headrace.events`, on any thread. One that raises is left out."""


class JobOptions(TypedDict, total=False):
    """Fields of `JobSettings` by name, for functions that pass them on."""

    text_column: str | None
    text_pair_column: str | None
    id_column: str | None
    prompt_template: str | None
    on_nan: OnNan
    on_empty: OnEmpty
    input_format: str | None
    output_format: str | None
    sql: str | None
    overwrite: bool
    ignore_changes: bool
    retry: bool
    prepare: PrepareFn | str | None
    finish: FinishFn | str | None
    worker_kind: WorkerKind
    dedupe: bool | None
    order: Order
    trace: str | Path | None
    listeners: Sequence[Listener]


def split_options(options: Mapping[str, object]) -> tuple[JobOptions, dict[str, object]]:
    """Split options into those of the job and those of the engine."""
    names = JobOptions.__annotations__.keys()
    job = {name: value for name, value in options.items() if name in names}
    return cast(JobOptions, job), {name: value for name, value in options.items() if name not in names}


SETTING_NAMES = tuple(
    one.name for kind in (JobSettings, Selection, Limits) for one in fields(kind) if one.name != "step"
)
"""Names to suggest for an unknown engine option."""


_PER_RUN = frozenset(
    {"config", "sink", "limits", "overwrite", "ignore_changes", "retry", "order", "trace", "listeners"}
)
"""Settings that may differ between runs of one job."""


def as_json(settings: JobSettings) -> JsonObject | None:
    """The settings as JSON, to start the job again; None if they contain Python rows or functions."""
    flat = {**_shallow(settings), **_shallow(settings.config)}  # one level, as jobs of earlier versions have it
    kept = {name: value for name, value in flat.items() if name not in _PER_RUN}
    if not isinstance(kept["source"], (str, Path)) or str(kept["source"]) == "-":
        return None
    source = str(kept["source"])
    kept["source"] = without_password(source) if is_address(source) else source
    for name in ("prepare", "finish"):
        if kept[name] is not None and not isinstance(kept[name], str):
            return None
    kept["selection"] = asdict(settings.selection)
    kept["step"] = None if settings.step is None else asdict(settings.step)
    try:
        found: JsonObject = json.loads(json.dumps(kept))
    except TypeError:
        return None
    return found


def from_json(kept: Mapping[str, Any], sink: str | Path, limits: Limits, *, ignore_changes: bool) -> JobSettings:
    """The settings to retry with what `as_json` gave."""
    chosen = dict(kept["selection"])
    shard = chosen.pop("shard")
    selection = Selection(shard=tuple(shard) if shard else None, **chosen)
    given: dict[str, Any] = {**kept, "keep_columns": tuple(kept["keep_columns"]), "selection": selection}
    if (step := kept.get("step")) is not None:
        given["step"] = _step(step)
    config = EngineConfig(**{one.name: given.pop(one.name) for one in fields(EngineConfig) if one.name in given})
    return JobSettings(sink=sink, config=config, limits=limits, ignore_changes=ignore_changes, retry=True, **given)


def _step(kept: Mapping[str, Any]) -> StepSettings:
    choice = kept["choice"]
    return StepSettings(
        kept["name"],
        kept["column"],
        kept["begun"],
        tuple(EarlierStep(**step) for step in kept["earlier"]),
        choice and ModelChoice(choice["column"], choice["model"], tuple(choice["models"])),
        kept["is_last"],
    )


def _shallow(settings: JobSettings | EngineConfig) -> dict[str, object]:
    return {one.name: getattr(settings, one.name) for one in fields(settings)}


def anchored(settings: JobSettings) -> JobSettings:
    """The settings with absolute paths, for user code may change the current folder.

    Raises:
        ConfigError: there is no current folder any more.
    """
    changed: dict[str, Any] = {"config": settings.config.anchored()}
    for name in ("source", "sink", "trace"):
        path = getattr(settings, name)
        if isinstance(path, (str, Path)) and not is_address(path):
            changed[name] = anchored_path(path)
    return replace(settings, **changed)


def check_values(settings: JobSettings) -> None:
    """Check the type of each setting and the range of each number.

    Raises:
        ConfigError: a setting is invalid; the message names it.
    """
    check_types(settings, "sink", "listeners")  # the sink is checked elsewhere
    if not isinstance(settings.listeners, list | tuple) or not all(map(callable, settings.listeners)):
        raise ConfigError(f"listeners is {shown(settings.listeners)}; it must be a list of functions")
    check_types(settings.config)
    check_types(settings.limits)
    limits = settings.limits
    checks: tuple[tuple[str, float | None, bool, str], ...] = (
        ("max_error_rate", limits.max_error_rate, 0 <= limits.max_error_rate <= 1, "between 0 and 1"),
        ("max_errors", limits.max_errors, limits.max_errors is None or limits.max_errors >= 0, ">= 0"),
        ("max_attempts", limits.max_attempts, limits.max_attempts >= 1, ">= 1"),
        ("retry_wait_s", limits.retry_wait_s, limits.retry_wait_s >= 0, ">= 0"),
        ("workers", limits.workers, limits.workers is None or limits.workers >= 1, ">= 1"),
        ("buffer_memory", limits.buffer_memory, limits.buffer_memory >= 1, ">= 1 byte"),
        ("part_records", limits.part_records, limits.part_records >= 1, ">= 1"),
        ("commit_interval_s", limits.commit_interval_s, limits.commit_interval_s > 0, "> 0"),
    )
    for name, value, good, allowed in checks:
        if not good:
            raise ConfigError(f"{name} is {value!r}; it must be {allowed}")
