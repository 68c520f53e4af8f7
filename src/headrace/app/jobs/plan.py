"""Check a job before its model is loaded: settings, input, output, and whether it is finished."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

from headrace.app.jobs.downloads import model_state, resolved_for
from headrace.app.jobs.expected_rows import expected_rows
from headrace.engines.choosing import registry
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.identity import identity
from headrace.engines.choosing.served import served_model
from headrace.engines.custom import may_take_rows
from headrace.engines.declaring import Task
from headrace.engines.requests.generation import SAMPLING
from headrace.engines.requests.long_prompts import splits
from headrace.engines.requests.templates import chat_of, template_text
from headrace.engines.tasks import task_named, tasks_for
from headrace.errors import ConfigError, attempted
from headrace.io.base import PartWriter, Source, needing
from headrace.io.formats import openai_batch as openai
from headrace.io.formats.flat import Fields
from headrace.io.formats.writer import Layout
from headrace.io.sinks.callback_sink import CallbackWriter, Rows, check_receiver
from headrace.io.sinks.targets import Target, find_target, openai_writer, refuse_output_in_input
from headrace.io.sources.images import ImageSource
from headrace.io.sources.in_memory import IterableSource
from headrace.io.sources.joined import JoinedSource, StepOutput
from headrace.io.sources.opening import TextRules, open_source, pinned, warn_if_empty
from headrace.io.sources.selection import SelectedSource
from headrace.io.storage.atomic import remove_throwaway, target_of, throwaway_folder
from headrace.io.storage.rows import FileSource
from headrace.jobs.answer_form import AnswerForm, schema_of
from headrace.jobs.pipeline import candidates
from headrace.jobs.pipeline.inputs import WHOLE, Columns
from headrace.jobs.pipeline.preparers import EarlyProcesses
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.planning.columns import first_rows, resolve
from headrace.jobs.planning.forecast import check_room
from headrace.jobs.settings import SETTING_NAMES, JobSettings, StepSettings, anchored, as_json, check_values
from headrace.jobs.state.fingerprint import has_other_input, with_options
from headrace.jobs.state.inspection import inspect
from headrace.jobs.state.job_state import FinishedJob, JobState
from headrace.jobs.state.output import JobOutput, StartMode
from headrace.jobs.state.state_file import read_state
from headrace.options import declared
from headrace.records import LeftOut, Unreadable, kept_value, outer

logger = logging.getLogger("headrace")

_TRIED_ROWS = 64
_TOLD_BY_MEANING = frozenset(
    {
        "text_column",
        "text_pair_column",
        "id_column",
        "prompt_template",
        "keep_columns",  # with their defaults resolved
        "output_schema",
        "answer_regex",
        "choices",
        "schema_in_prompt",  # the form of an answer
        "prepare",
        "finish",  # by name
    }
)
"""Settings whose facts in the fingerprint are not the values that were given."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked job whose model is not loaded yet."""

    settings: JobSettings
    """With the task resolved."""
    source: Source
    columns: Columns
    output: JobOutput
    user: UserCode
    left_out: tuple[LeftOut, ...]
    """Entries of the input that a listing shows but the job does not read."""
    opened: Source
    """What the settings name; `source` may select from it."""
    form: AnswerForm | None = None
    """The form that each answer must have."""
    early: EarlyProcesses | None = None
    """Processes that can prepare records; None where none were started before the model was loaded."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the user's functions, release what the input holds open, and remove the files of a job without output."""
        self.user.close()
        remove_throwaway(self.output.target)
        _release(self.opened)


def check(settings: JobSettings, *, own_engine: bool = True) -> Plan:
    """Open the input, look at its first rows and check that the output can be written. Writes nothing.

    Args:
        own_engine: whether the job loads the engine in the settings; False if it receives a loaded one.

    Raises:
        ConfigError: a file, column or format cannot be used.
    """
    check_values(settings)
    settings = anchored(settings)
    target = _target(settings)
    if isinstance(settings.source, str):
        settings = replace(settings, source=pinned(settings.source, lambda: _begun(settings, target)))
    if isinstance(settings.source, (str, Path)):
        refuse_output_in_input(settings.source, target)
    rules = TextRules(settings.input_delimiter, settings.input_encoding)
    opened = open_source(settings.source, settings.input_format, settings.sql, rules)
    with contextlib.ExitStack() as undo:
        undo.callback(_release, opened)
        plan = _checked(settings, opened, target, undo, own_engine=own_engine)
        undo.pop_all()
    return plan


def _release(opened: Source) -> None:
    if isinstance(opened, IterableSource):
        opened.close()


def _checked(
    settings: JobSettings, opened: Source, target: Target, undo: contextlib.ExitStack, *, own_engine: bool
) -> Plan:
    """The plan. What must be undone if `check` raises is added to `undo`."""
    source = opened
    left_out = tuple(source.left_out) if isinstance(source, (FileSource, ImageSource)) else ()
    url = openai.url_of(source)
    if own_engine and url in openai.SERVER_ONLY:
        raise ConfigError(
            f"the batch file asks for {url}, which jobs do not answer; upload it to the Batch API of a server "
            "(``headrace serve state``), or give the texts as columns"
        )
    config = settings.config.resolved(tasks_for(url)[0] if url else None)
    settings = replace(settings, config=config)
    if own_engine:
        config.check(SETTING_NAMES)
    _check_preparing(settings)
    task = task_named(config.task)
    settings = replace(settings, prompt_template=_template(settings, task))
    if settings.documents_column is not None:
        _check_documents(settings, task, url)
    elif url is None and task.pairs == ("always" if settings.text_pair_column is None else "never"):
        need = "takes pairs: name the column of" if task.pairs == "always" else "takes no pairs: leave out"
        lists = ", or that of lists of them (``documents_column``)" if task.outputs == "score" else ""
        raise ConfigError(f"task {config.task!r} {need} the second text (``text_pair_column``){lists}")
    settings, form = _form(settings, task, url, own_engine=own_engine)
    _check_samples(settings, task, url)
    source, shown = _selected(source, settings, url)
    column, makes_folder = output_column(settings), settings.step is not None and not settings.step.is_last
    user = UserCode.of(settings)
    undo.callback(user.close)
    wanted = _columns(settings, task, url)
    if settings.step is None or not settings.step.earlier:
        warn_if_empty(_sparing(opened, settings, wanted), settings.source)
    found = resolve(_sparing(shown, settings, wanted), wanted, user if settings.prepare else None)
    source, shown = _sparing(source, settings, found), _sparing(shown, settings, found)
    output = JobOutput(target, _writer(settings, target, column, found, url, form), makes_folder=makes_folder)
    if column in found.keep:
        raise ConfigError(f"cannot keep column {column!r}: the output of task {config.task!r} has that name")
    is_exact = target.check_column is not None and url is None and target.table is None
    found = replace(found, exact=is_exact, on_empty=settings.on_empty)
    if url is None and settings.prepare is None:
        _check_kept(shown, found, target)
    if settings.prepare is None and (task.requests or url == openai.EMBEDDINGS):
        _check_unsent(shown, config, found, url)
        _check_sampling(shown, settings, found, own_engine=own_engine)
    _check_output(settings, output)
    attempted(output.writer.expect, lambda: expected_rows(shown, found, settings, form))
    if own_engine:
        settings = replace(settings, config=resolved_for(settings, output))
    return Plan(settings, source, found, output, user, left_out, opened, form)


def _check_preparing(settings: JobSettings) -> None:
    """Check that processes which were asked for would not stay idle. A step of several may do without.

    Raises:
        ConfigError: another setting leaves them idle.
    """
    if settings.step is None and (asked := settings.limits.prepare_processes) and (name := prepares_alone(settings)):
        raise ConfigError(
            f"``prepare_processes={asked}`` does not go with ``{name}``: records are then prepared one by one, in the "
            "process of the job; leave one out"
        )


def prepares_alone(settings: JobSettings) -> str:
    """The setting for which records are prepared one by one, in the process of the job; empty for none."""
    given = {
        "prepare": settings.prepare is not None,
        "finish": settings.finish is not None,
        "dedupe": settings.dedupe,
        "documents_column": settings.documents_column is not None,
        "on_too_long=split": settings.config.engine_options.get("on_too_long") == "split",
        "engine_timeout_s": settings.config.call_timeout_s is not None,
        "engine_process": settings.config.engine_process,
    }
    return next((name for name, needs in given.items() if needs), "")


def _sparing(source: Source, settings: JobSettings, columns: Columns) -> Source:
    """The source, without damage and encryption of columns that the job does not use."""
    used = columns.used()
    whole = settings.prepare is not None or settings.finish is not None or not used
    return source if whole else needing(source, ("id", *used))


def output_column(settings: JobSettings) -> str:
    """The column of the outputs of a job whose task is resolved."""
    if settings.step is not None:
        return settings.step.column
    return candidates.COLUMN if settings.documents_column is not None else task_named(settings.config.task).output


def _check_documents(settings: JobSettings, task: Task, url: str | None) -> None:
    """Check that the job can rank lists of documents.

    Raises:
        ConfigError: its task gives no scores, or another setting does not go with these.
    """
    if task.outputs != "score":
        raise ConfigError(
            f"``documents_column`` needs a task that scores pairs, such as ``task=score``: {task.name} does not"
        )
    others = {
        "text_pair_column": settings.text_pair_column is not None,
        "prompt_template": settings.prompt_template is not None,
        "on_too_long=split": settings.config.engine_options.get("on_too_long") == "split",
    }
    if name := next((name for name, given in others.items() if given), None):
        raise ConfigError(f"``{name}`` does not go with ``documents_column``; leave one out")
    if url is not None or settings.step is not None:
        here = "a batch file, whose requests have their own documents" if url else "several steps"
        raise ConfigError(f"``documents_column`` does not go with {here}; leave it out")


def _form(
    settings: JobSettings, task: Task, url: str | None, *, own_engine: bool
) -> tuple[JobSettings, AnswerForm | None]:
    """The form of the answers, with its schema among the settings as JSON.

    Raises:
        ConfigError: it is invalid, or the engine cannot hold answers to it.
    """
    if settings.output_schema is not None:
        settings = replace(settings, output_schema=schema_of(settings.output_schema))
    form = AnswerForm.of(settings)
    if form is None:
        return settings, None
    name = form.structure.said_in
    if not task.requests or url is not None or settings.step is not None:
        here = (
            "a batch file, whose requests say it"
            if url
            else "a job of several steps"
            if settings.step
            else (f"task {settings.config.task!r}, whose outputs are no answers")
        )
        raise ConfigError(f"{name} gives answers their form, which does not go with {here}; leave it out")
    if splits(settings.config.engine_options, settings.prompt_template):
        raise ConfigError(f"{name} does not go with ``on_too_long=split``: chunks have other answers; leave one out")
    holds = registry.holds_forms(settings.config.task or "", settings.config.engine) if own_engine else False
    if holds:
        from headrace.engines.requests.grammar_text import problem_in

        if (problem := problem_in(form.structure)) is not None:
            form = replace(form, structure=form.structure.lenient)
            if problem_in(form.structure) is not None:
                raise ConfigError(f"{name}: {problem}")
            logger.warning("%s: only checked, not forced: %s", name.strip("`"), problem.partition(": ")[2])
    return settings, form


def _check_samples(settings: JobSettings, task: Task, url: str | None) -> None:
    """Check that records can have several answers. Raises ConfigError: they cannot."""
    name = "n" if settings.n > 1 else "best_of" if settings.best_of is not None else None
    if name is None:
        return
    if not task.requests or url is not None:
        here = (
            "a batch file, whose requests have one answer each"
            if url
            else f"task {settings.config.task!r}: set ``task=generate``"
        )
        raise ConfigError(f"``{name}`` gives several answers to a prompt, which does not go with {here}")
    if splits(settings.config.engine_options, settings.prompt_template):
        raise ConfigError(f"``{name}`` does not go with ``on_too_long=split``; leave one out")
    if settings.best_of is not None and settings.best_of < settings.n:
        raise ConfigError(f"``best_of`` is {settings.best_of}, and ``n`` is {settings.n}: it must be at least that")


def _columns(settings: JobSettings, task: Task, url: str | None) -> Columns:
    """The columns as the settings have them, not yet looked for in the input."""
    id_column = settings.id_column
    if url and id_column is None:
        id_column = "id"  # each request has one, though the first is refused
    custom = url is None and task.name == "custom"
    free = custom and _names_no_column(settings)
    alone = settings.text_pair_column is None and settings.prompt_template is None
    several = custom and alone and "," in (settings.text_column or "")
    if several and not all(name.strip() for name in str(settings.text_column).split(",")):
        raise ConfigError(
            f"``text_column`` is {settings.text_column!r}, of which one name is empty: give names with a comma between "
            "them, such as title,body"
        )
    return Columns(
        settings.text_column or (task.input if url in (None, openai.EMBEDDINGS) else "body"),
        id_column,
        task.text_only,
        settings.text_pair_column,
        settings.documents_column,
        template_text(settings.prompt_template),
        ("model",) if url else settings.keep_columns,  # which the answer to a request repeats
        None if settings.step is None else settings.step.choice,
        task.requests and splits(settings.config.engine_options, settings.prompt_template),
        else_row=several or (free and (settings.text_column == WHOLE or may_take_rows(settings.config.engine))),
        else_array=free,
        served=served_model(None, settings.config) if settings.config.adapters else None,
    )


def _template(settings: JobSettings, task: Task) -> str | None:
    """The prompt template as text. Raises ConfigError: it is no template, or a chat for a task that takes none."""
    template = template_text(settings.prompt_template)
    if template is not None and not task.requests and chat_of(template) is not None:
        raise ConfigError(
            f"``prompt_template`` is a chat, which task {task.name!r} does not take: give a text, or set "
            "``task=generate``"
        )
    return template


def _names_no_column(settings: JobSettings) -> bool:
    named = settings.text_column not in (None, WHOLE) or settings.text_pair_column is not None
    return not named and settings.prompt_template is None


def _check_output(settings: JobSettings, output: JobOutput) -> None:
    """Check that the output can be written and belongs to this job."""
    try:
        if settings.overwrite or settings.retry or not output.is_finished:
            for place in (target_of(output.target), output.work):  # which may be on two disks
                check_room(place)
        if not (settings.overwrite or settings.retry):
            output.refuse_foreign_files()
    except OSError as error:
        raise ConfigError(f"cannot write {output.name}: {error.strerror or error}") from error
    if not output.is_finished:
        output.writer.check(begun=settings.overwrite or output.has_begun)
    if not settings.overwrite and output.writer.is_gone() and output.read_state() is not None:
        found = inspect(str(settings.sink))
        if rows := found.records - found.failed:
            raise ConfigError(
                f"{output.name} holds none of the {rows:,} rows that the job here has put there: restore them, or pass "
                "``overwrite=True`` to start again"
            )


def _check_kept(source: Source, columns: Columns, target: Target) -> None:
    """Check in the first rows that the output can hold the columns to keep, and say which change their type.

    A single value that it cannot hold fails its record only.
    """
    if target.check_column is None or not columns.keep:
        return
    rows = first_rows(source)[:_TRIED_ROWS]
    refused: dict[str, ConfigError] = {}
    for name in columns.keep:
        values = [kept_value(row.data, name, exact=columns.exact) for row in rows if _can_keep(row.data, name)]
        try:
            target.check_column(name, values)
        except ConfigError as error:
            refused[name] = error
    if refused:
        [first, *others] = refused
        more = f"; nor can it keep {', '.join(map(repr, others))}" if others else ""
        raise ConfigError(f"{refused[first]}{more}")


def _can_keep(row: Mapping[str, object], name: str) -> bool:
    value = row.get(name)
    return type(value) is not Unreadable or value.is_exact


def _check_unsent(source: Source, config: EngineConfig, columns: Columns, url: str | None) -> None:
    """Say which settings in the first rows reach no model."""
    rows = first_rows(source)
    known = dict.fromkeys(name for record in rows[:_TRIED_ROWS] for name in record.data)
    if url is None:
        used = {*columns.inputs(), *map(outer, columns.inputs()), columns.id, *columns.keep}
        names = (*SAMPLING, *(("model", "adapter") if config.adapters else ()))
        if unsent := [name for name in known if name in names and name not in used]:
            logger.warning(
                "headrace: the column %r is not used: a row's own goes into its request, as in "
                '{"prompt": "...", %s: ...} in the column %r; one for all is a setting of the job',
                unsent[0], json.dumps(unsent[0]), columns.text,
            )  # fmt: skip
        return
    named = next((name for record in rows[:_TRIED_ROWS] if (name := record.data["model"])), None)
    if named is not None and registry.is_remote(config.engine) and config.model is None and url == openai.EMBEDDINGS:
        raise ConfigError(
            f"the lines of the batch file name the model {named!r}, and the engine endpoint sends texts without: pass "
            f"``model={named!r}``"
        )


def _check_sampling(source: Source, settings: JobSettings, columns: Columns, *, own_engine: bool) -> None:
    """Check that several answers may differ. Raises ConfigError: the engine is Headrace's own, and at temperature 0.

    A record that is no text may have a temperature of its own.
    """
    name = "n" if settings.n > 1 else "best_of" if (settings.best_of or 1) > 1 else None
    config = settings.config
    holds = own_engine and registry.holds_forms(config.task or "", config.engine)
    if name is None or not holds or config.engine_options.get("temperature"):
        return
    rows = first_rows(source)
    texts = [columns.template is not None or isinstance(row.data.get(columns.text), str) for row in rows[:_TRIED_ROWS]]
    if texts and all(texts):
        raise ConfigError(
            f"``{name}`` is {getattr(settings, name)}, and all answers to a prompt are equal at temperature 0: raise "
            f"``temperature``, or leave ``{name}`` out"
        )


def _begun(settings: JobSettings, target: Target) -> str | None:
    """The source with which the job that is resumed was begun; None for a new job, or one without stored settings."""
    state = None if settings.overwrite else read_state(target.work / "job.json")
    kept = None if state is None else state.settings
    return str(kept["source"]) if kept else None


def _target(settings: JobSettings) -> Target:
    sink = settings.sink
    if isinstance(sink, (str, Path)):
        return find_target(sink, settings.output_format)
    if not isinstance(sink, Rows):
        check_receiver(sink)
    # A job needs a working folder, though this one cannot be resumed.
    return Target(throwaway_folder(), True, "rows", make_writer=lambda layout: CallbackWriter(sink, layout.column))


def _selected(source: Source, settings: JobSettings, url: str | None) -> tuple[Source, Source]:
    """The rows that the job reads, and those of the whole input as far as they can be shown now.

    The columns are those of the whole input, so that all shards and samples of it have the same.
    """
    selected = source if settings.selection.is_all else SelectedSource(source, settings.selection)
    if settings.step is None:
        return selected, source
    if url is not None:
        raise ConfigError("the requests of an OpenAI batch file are to one model; it cannot be used with several steps")
    if getattr(source, "reads_once", False):
        raise ConfigError(
            "the input is an iterator, which can be read once, and each step reads it; give a list, or a function that "
            "returns a new iterator"
        )
    if not settings.step.earlier:
        return selected, source
    return _joined(selected, settings.step), _joined(source, settings.step).preview()  # outputs may not be there yet


def _joined(source: Source, step: StepSettings) -> JoinedSource:
    """The input of a step, with the outputs of the steps before it."""
    outputs = []
    for earlier in step.earlier:
        target = find_target(earlier.output)
        outputs.append(StepOutput(earlier.name, earlier.column, target.place, target.errors, target.format))
    facts: dict[str, object] = {earlier.name: earlier.facts for earlier in step.earlier}
    return JoinedSource(source, outputs, facts, as_answer=step.choice is not None)


def _writer(
    settings: JobSettings, target: Target, column: str, columns: Columns, url: str | None, form: AnswerForm | None
) -> PartWriter:
    if url is None or not isinstance(settings.sink, (str, Path)):
        if target.vectors and settings.finish is None:
            _check_vectors(target, settings.config)
        kept = columns.keep if "*" in settings.keep_columns else settings.keep_columns
        parsed = None if form is None or form.validator is None else form.shape
        layout, fields = Layout(column, kept, settings.on_nan, parsed=parsed), _fields(settings, column, kept)
        writer = target.writer(layout if fields is None else layout.flattened(fields))
        writer.fields = fields
        return writer
    if target.table is not None:
        raise ConfigError("the answers to an OpenAI batch file go to a .jsonl file, not to a table")
    chosen = settings.config.task
    if chosen not in (tasks := tasks_for(url)):
        raise ConfigError(f"the batch file asks for {url}, which is task {tasks[0]!r}, not {chosen!r}")
    if settings.keep_columns or settings.flatten:
        name = "keep_columns" if settings.keep_columns else "flatten"
        raise ConfigError(f"the answer to an OpenAI batch file has its own columns; leave out ``{name}``")
    return openai_writer(target, url, settings.on_nan)


def _fields(settings: JobSettings, column: str, kept: Sequence[str]) -> Fields | None:
    """The fields of outputs that are to be columns; None to leave outputs whole."""
    if not settings.flatten:
        return None
    if settings.step is not None:
        raise ConfigError("``flatten`` does not go with several steps, which read each other's outputs; leave it out")
    if column in settings.flatten:
        raise ConfigError(f"``flatten`` names {column!r}, which is the output itself: name its fields")
    task = task_named(settings.config.task)
    paths = [(name, name) for name in settings.flatten if name != "auto"]
    if "auto" in settings.flatten:
        fields = task.fields if settings.documents_column is None else candidates.FIELDS
        if not fields and not paths:
            raise ConfigError(
                f"outputs of task {task.name!r} have no fields that are known before: name them, as in "
                "``flatten=text,score``"
            )
        paths = [*((name, name) for name in fields), *paths]
        more = settings.config.engine_options.get("top_labels")
        for place in range(1, more if task.outputs == "labels" and isinstance(more, int) else 0):
            paths += [(f"label_{place + 1}", f"labels.{place}"), (f"score_{place + 1}", f"scores.{place}")]
    return Fields.of(list(dict.fromkeys(paths)), column, ("id", *kept))


def _check_vectors(target: Target, config: EngineConfig) -> None:
    """Check that the outputs are vectors as the target takes them."""
    numbers = config.engine_options.get("output_dtype") or "float32"
    if task_named(config.task).outputs not in ("vector", "any"):
        raise ConfigError(
            f"cannot write {target}: the outputs of task {config.task!r} are not vectors, and it takes vectors alone; "
            "write to another kind of table or a file, or make vectors with a function (``finish``)"
        )
    if numbers != target.vectors:
        raise ConfigError(
            f"cannot write {target}: ``output_dtype`` is {numbers!r}, and it takes {target.vectors}; leave it out, or "
            "write to another kind of table or a file"
        )


def finished_before(plan: Plan) -> FinishedJob | None:
    """How the job ended, if it is known without loading the engine; else None.

    The engine is identified by its name, options and files; all other settings are compared as in any resume, also
    those of a job that has not ended.

    Raises:
        ConfigError: the files of the finished job have changed.
        ResumeMismatchError: the job was started with other settings, or has finished with another input.
    """
    settings, output = plan.settings, plan.output
    state = None if settings.overwrite else output.read_state()
    facts = None if state is None else state.fingerprint.get("engine")
    if state is None or not isinstance(facts, dict):
        return None
    asked = (state.settings or {}).get("engine_options")
    options = asked if isinstance(asked, Mapping) else {}
    start = start_mode(plan, with_options(facts, options, settings.config.engine_options))
    output.refuse_changes(state, start, retry=settings.retry)
    if not output.is_finished or state.finished is None:
        return None
    if settings.ignore_changes:
        if not settings.retry and has_other_input(state.fingerprint, start.state.fingerprint):
            with output.locked():
                output.begin(start)
        return None
    if start.state.made_of is None or start.state.made_of != state.made_of:
        return None
    if settings.retry and state.finished.failed:
        return None
    with output.locked():
        ended = output.begin_retry(start) if settings.retry else output.begin(start)
    return ended if isinstance(ended, FinishedJob) else None


def start_mode(plan: Plan, engine: Mapping[str, object]) -> StartMode:
    """How the job starts on its output, with an engine of this description."""
    settings = plan.settings
    state = JobState(fingerprint(plan, engine), as_json(settings), engine_identity(settings), model_state(settings))
    return StartMode(state, changes(settings))


def engine_identity(settings: JobSettings) -> str | None:
    """Identifies the engine by its name, options and files; None if it cannot be identified without loading it."""
    config = settings.config
    return identity(config.task or "", config.model, config.engine, config.engine_options, config.commit)


def fingerprint(plan: Plan, engine: Mapping[str, object]) -> dict[str, object]:
    """The facts that determine the output. A commit stands for the digest of a downloaded model's files."""
    commit = plan.settings.config.commit
    if commit is not None:
        digests = ("model", "model_digest")  # vLLM's name, and that of all others
        engine = {name: value for name, value in engine.items() if name not in digests} | {"commit": commit}
    return {
        "source": plan.source.describe(),
        "engine": engine,
        "task": plan.settings.config.task,
        "text_column": ",".join(plan.columns.row) or plan.columns.text,
        "text_pair_column": plan.columns.pair,
        "id_column": plan.columns.id,
        "prompt_template": plan.columns.template,
        "keep_columns": list(plan.columns.keep),
        **plan.user.describe(),
        **({} if plan.form is None else plan.form.describe()),
        **_as_given(plan.settings),
        **({"table": plan.output.table} if plan.output.table is not None else {}),
        **_step_facts(plan.settings.step),
    }


def _as_given(settings: JobSettings) -> dict[str, object]:
    """The settings that change outputs, differ from their defaults and are told as they are given."""
    facts: dict[str, object] = {}
    for one in declared(JobSettings):
        value = getattr(settings, one.name)
        if one.option.changes_output and one.name not in _TOLD_BY_MEANING and value != one.default:
            facts[one.name] = list(value) if isinstance(value, tuple) else value
    return facts


def _step_facts(step: StepSettings | None) -> dict[str, object]:
    if step is None:
        return {}
    chosen = {} if step.choice is None else {"model_column": asdict(step.choice)}
    return {"step": {"name": step.name, "column": step.column, "begun": step.begun, **chosen}}


def changes(settings: JobSettings) -> Literal["refuse", "ignore", "overwrite"]:
    """What to do if the output was started with other settings."""
    return "overwrite" if settings.overwrite else "ignore" if settings.ignore_changes else "refuse"
