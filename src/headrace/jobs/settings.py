"""Settings of a job; those of its batches are in `engines.choosing.config`, as servers have them too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from headrace.argument_types import check_types, comma_separated, named, number_or_auto, parse_size
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError
from headrace.events import Listener
from headrace.io.formats.known import known_formats, written_formats
from headrace.io.formats.strict_json import OnNan
from headrace.io.sinks.callback_sink import Receiver, Rows
from headrace.io.sources.selection import Selection
from headrace.io.storage.addresses import is_address, without_password
from headrace.io.storage.locations import anchored as anchored_path
from headrace.options import all_declared, option
from headrace.plugins import addresses
from headrace.records import Json, JsonObject
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
    """The column that holds its output."""
    begun: str
    """Changes when all steps are started again, so that no step continues with outputs of another start."""
    earlier: tuple[EarlierStep, ...] = ()
    choice: ModelChoice | None = None
    """Which records it computes; None for all."""
    is_last: bool = False
    """Whether it writes the output of the whole job."""


@named()
@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a job. None of them changes the output."""

    panel: ClassVar[str] = "Failures and resources"

    max_error_rate: float = option(
        0.5,
        "Stop when more than this fraction of the records has failed; checked after a tenth of the input.",
        minimum=0,
        maximum=1,
    )
    max_errors: int | None = option(
        None, "Stop when more than this number of records has failed. Default: no limit.", minimum=0
    )
    max_attempts: int = option(
        4, "Maximum attempts for a record that fails for a transient reason, such as a time-out.", minimum=1
    )
    retry_wait_s: float = option(
        0.5, "Maximum seconds before the second attempt; doubles for each later one.", flags=(), minimum=0
    )
    workers: int | None = option(
        None,
        "Chunks of records to prepare at once: a number, or auto to keep the model busy.",
        parse=number_or_auto,
        shown="auto",
        minimum=1,
    )
    prepare_processes: int | None = option(
        None,
        "Processes that prepare records, beside this one: a number, or auto for what the cores allow on a GPU, and "
        "none on a CPU, where the model needs the cores. Not with what prepares records one by one: functions of your "
        "own, dedupe, split texts, lists of documents, a time limit or a process of the engine. In a job of several "
        "steps, those that can use them do.",
        parse=number_or_auto,
        shown="auto",
        minimum=0,
    )
    buffer_memory: int = option(
        512_000_000,
        "Maximum memory for records between reading and writing, such as 2GB; the model is not counted.",
        parse=parse_size,
        shown="512MB",
        minimum=1,
    )
    part_records: int | None = option(
        None,
        "Rows of a part: a number, or auto for 4,096, and for up to 65,536 in a file where these are done in less "
        "than a quarter of a second.",
        flags=(),
        parse=number_or_auto,
        shown="auto",
        minimum=1,
    )
    commit_interval_s: float = option(
        2.0, "Maximum seconds before a finished row is committed: the work that a kill may lose.", flags=(), above=0
    )


FILES_PANEL = "Input and output"


@named()
@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings of a job."""

    panel: ClassVar[str] = "Records"

    source: object = option(
        MISSING,
        f"File, folder, glob or address (s3://...) of the records, or - for stdin: {', '.join(known_formats())}, "
        "images, an OpenAI batch file, a saved dataset, a Delta or Lance folder; text and tar files may be .gz or "
        f".zst. Or {', '.join(addresses('sources'))}, such as hf://datasets/org/name; of a database with ``sql``.",
        flags=("-i", "--input-file"),
        panel=FILES_PANEL,
        brief="file, folder, glob, address (s3://, hf://) or -",
    )
    """In Python also rows: see `headrace.io.sources.opening.open_source`."""
    sink: str | Path | Receiver | Rows = option(
        MISSING,
        f"File or address (s3://...) of the results: {', '.join(written_formats(own=True))}, all but parquet also with "
        f".gz or .zst; a name that ends in / is a folder of parts. Or {', '.join(addresses('sinks'))}, such as "
        "'postgresql://host/db?table=vectors'.",
        flags=("--output-file", "-o"),
        panel=FILES_PANEL,
        brief=".jsonl, .parquet or .csv file, folder or address",
    )
    """In Python also a function called with lists of rows: see `headrace.io.sinks.callback_sink.CallbackWriter`."""
    config: EngineConfig = field(default_factory=EngineConfig)
    """Task, model and engine."""
    input_format: str | None = option(
        None, f"Format of the input: {', '.join(known_formats())}. Default: from the name.", panel=FILES_PANEL
    )
    input_delimiter: str | None = option(
        None,
        "What separates the fields of a row of CSV input, such as ';'. Default: a comma, or a tab for tsv.",
        flags=("--input-delimiter", "--delimiter"),
        panel=FILES_PANEL,
        changes_output=True,
    )
    input_encoding: str | None = option(
        None,
        "Encoding of input files of text, such as cp1252 or utf-16. Default: utf-8.",
        flags=("--input-encoding", "--encoding"),
        panel=FILES_PANEL,
        changes_output=True,
    )
    output_format: str | None = option(
        None,
        f"Format of the output: {', '.join(written_formats(own=True))}. Default: from the name.",
        panel=FILES_PANEL,
    )
    sql: str | None = option(
        None,
        "Query whose rows are the input, if the source is a database; it must sort them.",
        panel=FILES_PANEL,
    )
    on_nan: OnNan = option(
        "null", "Write NaN and infinities in JSON output as null, or fail the record.", panel=FILES_PANEL
    )
    on_empty: OnEmpty = option(
        "keep",
        "Process an empty text, such as an empty cell of a CSV file, or fail the record.",
        panel=FILES_PANEL,
    )
    overwrite: bool = option(
        False,
        "Start again and replace an existing output.",
        panel=FILES_PANEL,
        brief="start again and replace an existing output",
    )
    ignore_changes: bool = option(
        False,
        "Continue although the input, model or parameters have changed; finished records stay as they are.",
        panel=FILES_PANEL,
    )
    text_column: str | None = option(
        None,
        'Column of the text, prompt or image; for a function also several, such as title,body. Default: "text", or '
        '"image" for image tasks.',
        flags=("--text-column", "--prompt-column", "--image-column"),
        per_step=True,
        changes_output=True,
        brief="column of the text, prompt or image",
    )
    text_pair_column: str | None = option(
        None,
        "Column of the second text of a pair, for score and classify. Default: none.",
        per_step=True,
        changes_output=True,
    )
    documents_column: str | None = option(
        None,
        "Column of a list of documents, which score ranks for the text of each row. Default: none.",
        changes_output=True,
    )
    id_column: str | None = option(
        None,
        'Column of the unique record id; "" is the position. Default: "id" if it exists, else the position.',
        changes_output=True,
        brief="column of the unique id",
    )
    prompt_template: str | Sequence[Mapping[str, object]] | None = option(
        None,
        'Template that builds the text from columns, such as "Q: {question}"; for a chat a list of messages, as JSON '
        "or in a .json file. Default: the text column.",
        per_step=True,
        changes_output=True,
        brief='builds the text from columns: "Q: {question}"',
    )
    output_schema: object = option(
        None,
        'JSON schema of each answer, or a file with one; the value becomes the field "parsed" of the output. In '
        "Python also a class of pydantic, a dataclass or a dict of types.",
        metavar="SCHEMA",
        changes_output=True,
    )
    answer_regex: str | None = option(
        None, "Regular expression that each answer matches as a whole. Default: none.", changes_output=True
    )
    choices: tuple[str, ...] = option(
        (),
        "Texts of which each answer is one, such as yes,no. Default: none.",
        parse=comma_separated,
        changes_output=True,
    )
    schema_in_prompt: bool = option(
        True, "Whether the prompt says the form of the answer before all else.", changes_output=True
    )
    reask: int = option(
        2,
        "How often to ask again, with the error, where an answer does not have the form that the job gives it.",
        minimum=0,
    )
    n: int = option(
        1,
        "Answers to each prompt; with several the output is their list. They differ by their random numbers, so "
        "``temperature`` must be above 0.",
        minimum=1,
        per_step=True,
        changes_output=True,
    )
    best_of: int | None = option(
        None,
        "Answers to compute for each prompt, of which the ``n`` with the highest mean log probability of a token are "
        "kept. Default: ``n``.",
        minimum=1,
        per_step=True,
        changes_output=True,
    )
    keep_columns: tuple[str, ...] = option(
        (),
        "Columns to copy to the output, such as a,b, or '*' for all that the first rows have. Default: none.",
        parse=comma_separated,
        changes_output=True,
        brief="columns to copy, such as a,b, or '*' for all",
    )
    flatten: tuple[str, ...] = option(
        (),
        "Fields of the output to write as columns of their own, such as text,reasoning; auto for those that the task "
        "always has, such as label,score. Default: none, the output is one column.",
        parse=comma_separated,
        changes_output=True,
        panel=FILES_PANEL,
        brief="fields of the output as columns: auto, or label,score",
    )
    selection: Selection = field(default_factory=Selection)
    """Which rows of the input are processed."""
    dedupe: bool | None = option(
        None,
        "Compute equal inputs only once; each record is still written. Default: only requests to language models "
        "without sampling.",
        flags=("--dedupe/--no-dedupe",),
    )
    order: Order = option(
        "auto",
        "Order of work for language models: prefix puts prompts that begin alike together, auto does so where it saves "
        "work. The output is always in the order of the input.",
    )
    prepare: PrepareFn | str | None = option(
        None,
        "Your module:function, (row) -> row, called for each input row. Default: none.",
        flags=("--map",),
        changes_output=True,
    )
    finish: FinishFn | str | None = option(
        None,
        "Your module:function, (row, output) -> output, called before writing. Default: none.",
        per_step=True,
        changes_output=True,
    )
    worker_kind: WorkerKind = option(
        "auto", "Where ``prepare`` and ``finish`` run; auto uses processes if threads would slow the job down."
    )
    limits: Limits = field(default_factory=Limits)
    trace: Path | str | None = option(
        None,
        "Write a trace of batches and stages for Perfetto or Chrome (JSON). Default: none.",
        panel="Estimate and report",
    )
    retry: bool = option(False, "Process only the failed records of the finished job.", flags=())
    listeners: Sequence[Listener] = option(
        (),
        "Functions that are called with each event of `headrace.events`, on any thread. One that raises is left out.",
        flags=(),
    )
    step: StepSettings | None = None
    """For one step of several: see `app.jobs.steps`."""


SETTING_NAMES = (*(one.name for one in all_declared(JobSettings)), "config", "selection", "limits")
"""Names to suggest for an unknown engine option."""
KEYWORDS = {
    flag: one.name
    for one in all_declared(JobSettings)
    for flag in (variable.removeprefix("HEADRACE_").lower() for variable in one.variables)
    if flag not in SETTING_NAMES
}
"""The keyword in Python for each flag that is named otherwise, such as `prepare` for `map`."""


def refuse_flag(name: str) -> None:
    """Raises ConfigError: a keyword has the name of a flag."""
    if name in KEYWORDS:
        raise ConfigError(f"{name} is the name of a flag; its keyword in Python is {KEYWORDS[name]}")


_PER_RUN = frozenset(
    {"config", "sink", "limits", "overwrite", "ignore_changes", "retry", "order", "reask", "trace", "listeners"}
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
    selection = asdict(settings.selection)
    selection["seed"] = selection.pop("sample_seed")  # its name on disk
    kept["selection"] = selection
    kept["step"] = None if settings.step is None else asdict(settings.step)
    try:
        found: JsonObject = json.loads(json.dumps(kept))
    except TypeError:
        return None
    return found


def from_json(kept: Mapping[str, Json], sink: str | Path, limits: Limits, *, ignore_changes: bool) -> JobSettings:
    """The settings to retry with what `as_json` gave."""
    chosen = dict(kept["selection"])
    shard, seed = chosen.pop("shard"), chosen.pop("seed")
    selection = Selection(shard=tuple(shard) if shard else None, sample_seed=seed, **chosen)
    given: dict[str, Any] = {
        **kept,
        "keep_columns": tuple(kept["keep_columns"]),
        "flatten": tuple(kept.get("flatten", ())),
        "choices": tuple(kept.get("choices", ())),
        "selection": selection,
    }
    if (step := kept.get("step")) is not None:
        given["step"] = _step(step)
    config = EngineConfig(**{one.name: given.pop(one.name) for one in fields(EngineConfig) if one.name in given})
    return JobSettings(sink=sink, config=config, limits=limits, ignore_changes=ignore_changes, retry=True, **given)


def _step(kept: Mapping[str, Json]) -> StepSettings:
    choice = kept["choice"]
    return StepSettings(
        kept["name"],
        kept["column"],
        kept["begun"],
        tuple(EarlierStep(**step) for step in kept["earlier"]),
        choice and ModelChoice(choice["column"], choice["model"], tuple(choice["models"])),
        kept["is_last"],
    )


def _shallow(settings: JobSettings | EngineConfig | Selection) -> dict[str, object]:
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


_EXCLUDED = {
    "text_column": ("prompt_template", "names the columns of the text"),
    "text_pair_column": ("prompt_template", "names the columns of the text"),
    "ignore_changes": ("overwrite", "starts again, with nothing to compare"),
}
"""Settings that have no effect beside another, each with that one and why."""
_DEFAULTS = {one.name: one.default for one in all_declared(JobSettings)}
_FORMS = ("output_schema", "answer_regex", "choices")
_NEEDED = {
    "sample_seed": ("sample",),
    "reask": _FORMS,
    "schema_in_prompt": _FORMS,
    "worker_kind": ("prepare", "finish"),
}
"""Settings that have no effect without another, each with those of which one is enough."""


def check_values(settings: JobSettings) -> None:
    """Check the type of each setting, the range of each number, and that none is given in vain.

    Raises:
        ConfigError: a setting is invalid; the message names it.
    """
    check_types(settings, "sink", "listeners")  # the sink is checked elsewhere
    if not isinstance(settings.listeners, list | tuple) or not all(map(callable, settings.listeners)):
        raise ConfigError(f"listeners is {shown(settings.listeners)}; it must be a list of functions")
    check_types(settings.config)
    check_types(settings.limits)
    for name, (other, why) in _EXCLUDED.items() if not settings.retry else ():  # those of an older job stay
        if getattr(settings, name) not in (None, False) and getattr(settings, other) not in (None, False):
            raise ConfigError(f"``{name}`` has no effect beside ``{other}``, which {why}: leave one out")
    values = {**_shallow(settings), **_shallow(settings.selection)}
    for name, others in _NEEDED.items() if not settings.retry else ():
        if values[name] != _DEFAULTS[name] and not any(map(values.get, others)):
            ways = " or ".join(f"``{other}``" for other in others)
            raise ConfigError(f"``{name}={values[name]}`` has no effect without {ways}: leave it out")
