"""Settings of a job of several steps: what a user says of each, and the `JobSettings` that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headrace.app.settings_file import from_keys, read_settings
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.tasks import known_tasks, task_named
from headrace.errors import ConfigError, nearest
from headrace.io.sinks.targets import Target, find_target
from headrace.jobs.settings import EarlierStep, FinishFn, JobSettings, ModelChoice, StepSettings
from headrace.options import declared, option
from headrace.wording import shown

FOLDER = "steps"
"""In the working folder of the output: the outputs of all steps but the last."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a job. Only the settings in which steps differ; the job has the others."""

    name: str | None = option(
        None, "Column of its output; with a model column, the name of its model there. Default: from task and model."
    )
    config: EngineConfig = field(default_factory=EngineConfig)
    """Its engine."""
    text_column: str | None = None
    text_pair_column: str | None = None
    prompt_template: str | Sequence[Mapping[str, object]] | None = None
    n: int = 1
    best_of: int | None = None
    finish: FinishFn | str | None = None


PER_STEP = tuple(one.name for one in declared(JobSettings) if one.option.per_step)
"""The settings of a job that each step has, beside those of its engine."""


def parse_steps(entries: object) -> list[Step]:
    """Steps from mappings, such as those in a file.

    Raises:
        ConfigError: an entry is not a mapping, has an unknown key, or a value of another type; the message names it.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ConfigError("steps must be a list of at least one step, such as [{task: embed}, {task: classify}]")
    return [from_keys(Step, entry, f"step {number}", PER_STEP) for number, entry in enumerate(entries, 1)]


def refuse_beside_steps(job: JobSettings) -> None:
    """Check that no setting of a step is given for the whole job. Raises ConfigError: one is."""
    default = JobSettings(job.source, job.sink)
    names = [name for name in PER_STEP if getattr(job, name) != getattr(default, name)]
    if given := job.config.given() + names:
        raise ConfigError(f"``{given[0]}`` is a setting of one step; with several steps, give it in each step")


def read_steps(path: Path) -> tuple[list[Step], str | None]:
    """The steps in a YAML or JSON file, and its `model_column`.

    Raises:
        ConfigError: the file cannot be read, or an entry is unknown or of the wrong type.
        MissingExtraError: it is YAML and PyYAML is not installed.
    """
    content = read_settings(path)
    keys = ("steps", "model_column")
    unknown = [key for key in content if key not in keys] if isinstance(content, Mapping) else []
    wrong = f"{shown(unknown[0])} is unknown{nearest(str(unknown[0]), keys)}" if unknown else ""
    if not isinstance(content, Mapping) or "steps" not in content:
        raise ConfigError(f'{path} must be a mapping with "steps", a list{wrong and "; " + wrong}')
    if wrong:
        raise ConfigError(f"{path}: {wrong}; known: {', '.join(keys)}")
    column = content.get("model_column")
    if not (column is None or isinstance(column, str)):
        raise ConfigError(f"{path}: model_column is {shown(column)}; it must be a text")
    try:
        return parse_steps(content["steps"]), column
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def settings_of(
    job: JobSettings, steps: Sequence[Step], begun: str, model_column: str | None = None
) -> list[JobSettings]:
    """The settings of each step; the last writes the job's output.

    Args:
        job: settings that all steps share; what a `Step` has is not used.
        steps: in their order.
        begun: see `StepSettings.begun`.
        model_column: column in which each record names the one step that computes it.

    Raises:
        ConfigError: a setting cannot be used with steps, or two steps have the same name.
    """
    if not isinstance(job.sink, (str, Path)):
        raise ConfigError("a job of several steps needs a file or folder as its sink, where it keeps what is done")
    if str(job.source) == "-":
        raise ConfigError(
            "``source=-`` cannot be used with several steps: each reads the input; write it to a file first"
        )
    if job.prepare is not None:
        raise ConfigError("``prepare`` cannot be used with several steps: prepare the input before the job")
    if job.order == "prefix":
        raise ConfigError(
            "``order`` is 'prefix', which one model may gain from: with several steps, leave ``order`` out"
        )
    configs = [step.config.resolved() for step in steps]
    columns = [task_named(config.task).output if config.task in known_tasks() else "output" for config in configs]
    names = _names(steps, columns, model_column)
    if model_column is None:
        columns = names
    elif len(set(columns)) > 1:
        raise ConfigError(f"with a model column all steps have one task; here the outputs are {', '.join(columns)}")
    target = find_target(job.sink, job.output_format)
    finishes = any(step.finish is not None for step in steps)
    found: list[JobSettings] = []
    earlier: list[EarlierStep] = []
    for number, (step, config) in enumerate(zip(steps, configs, strict=True), 1):
        last = number == len(steps)
        choice = None if model_column is None else ModelChoice(model_column, names[number - 1], tuple(names))
        output = job.sink if last else step_output(target, number, _format(target, config, model_column))
        kept = job.keep_columns if model_column else (*job.keep_columns, *columns[: number - 1])
        found.append(
            replace(
                job,
                sink=output,
                config=config,
                **{name: getattr(step, name) for name in PER_STEP},
                worker_kind=job.worker_kind if step.finish is not None or not finishes else "auto",
                keep_columns=kept if last else (),
                output_format=job.output_format if last else None,
                step=StepSettings(names[number - 1], columns[number - 1], begun, tuple(earlier), choice, last),
            )
        )
        earlier.append(EarlierStep(names[number - 1], columns[number - 1], str(output)))
    return found


def step_output(target: Target, number: int, format: Literal["jsonl", "parquet"]) -> str:  # noqa: A002
    """The file of the step with this number, from 1."""
    return str(target.work / FOLDER / f"{number}.{format}")


def _format(target: Target, config: EngineConfig, model_column: str | None) -> Literal["jsonl", "parquet"]:
    """JSON Lines keeps any output as it is; vectors take less room in Parquet."""
    if target.format != "parquet" or model_column is not None:
        return "jsonl"
    return "parquet" if task_named(config.task).outputs in ("vector", "sparse vector") else "jsonl"


def _names(steps: Sequence[Step], columns: Sequence[str], model_column: str | None) -> list[str]:
    names: list[str] = []
    for step, column in zip(steps, columns, strict=True):
        name = step.name
        if name is None and model_column is not None:
            if step.config.model is None:
                raise ConfigError("with a model column each step needs a model or a name, which records name")
            name = step.config.model
        elif name is None:
            name = (
                column if step.config.model is None else f"{column}_{step.config.model.rstrip('/').rpartition('/')[2]}"
            )
        if not name or (name == "id" and model_column is None):
            raise ConfigError(f"a step cannot be named {name!r}; its name is the column of its output")
        if name in names:
            raise ConfigError(f"two steps are named {name!r}; give each its own name")
        names.append(name)
    return names
