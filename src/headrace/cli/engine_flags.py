"""Flags of an engine, shared by all commands. Unknown flags become options of the engine."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import typer

from headrace.cli.flags import ENGINE_PANEL, Command, FlagGroup
from headrace.engines.choosing.config import EngineConfig, merged_options
from headrace.engines.choosing.registry import options_by_task
from headrace.engines.tasks import known_tasks
from headrace.errors import ConfigError, UnknownOptionError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that passes unknown flags to the engine."""

# Flags that are options of the engine, under the same name.
_OPTIONS = (
    "handler", "max_model_len", "on_too_long", "chunk_overlap", "chunk_join", "reduce_template", "no_answer",
    "device", "dtype", "quantize", "truncate_dim", "output_dtype", "prompt_name", "prompt",
)  # fmt: skip
_SWITCHES = ("normalize", "enforce_eager", "trust_remote_code")


@dataclass(frozen=True, slots=True)
class EngineFlags(FlagGroup):
    """Flags that make an `EngineConfig`."""

    panel: ClassVar[str] = ENGINE_PANEL

    task: Annotated[
        str | None,
        typer.Option(
            help=f"Task of the model: {', '.join(known_tasks())}. Default: embed, or custom with an engine "
            "of your own; in a job, that of an OpenAI batch file."
        ),
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model of the Hugging Face Hub (org/name or org/name@revision), a folder (local or s3://...), or an "
            "included model: all-MiniLM-L6-v2 (default for embed), arithmetic (default for generate), docstrings, "
            "digits. Repeatable in headrace run."
        ),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(help="onnx, vllm, static (for generate), or your module:name. Default: chosen by the task."),
    ] = None
    handler: Annotated[
        str | None, typer.Option(help="TorchServe handler to run: a .py file or a .mar archive. Default: none.")
    ] = None
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="Address of an OpenAI-compatible server to use; repeatable. Default: run the model here."),
    ] = None
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum tokens in a batch, padding included. Default: measured, or set by the engine."
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Maximum texts, images or prompts in a batch. Default: set by the engine.")
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens in a text. Default: the model's limit.")
    ] = None
    on_too_long: Annotated[
        Literal["truncate", "error", "split"] | None,
        typer.Option(
            help="Cut a text that is too long, fail its record or request, or split it into chunks and join their "
            "outputs. Default: truncate; for generate: error."
        ),
    ] = None
    chunk_overlap: Annotated[
        int | None,
        typer.Option(min=0, help="With --on-too-long split: tokens that neighbouring chunks share. Default: 0."),
    ] = None
    chunk_join: Annotated[
        Literal["mean", "max", "map-reduce", "first"] | None,
        typer.Option(
            help="With --on-too-long split: how outputs are joined. Default: mean for vectors and labels, max for "
            "scores of pairs, map-reduce for generate."
        ),
    ] = None
    reduce_template: Annotated[
        str | None,
        typer.Option(
            help="For generate, with --chunk-join map-reduce: the last prompt, such as 'Combine these summaries: "
            "{answers}'. Default: none."
        ),
    ] = None
    no_answer: Annotated[
        str | None,
        typer.Option(
            help="For generate, with --chunk-join first: how an answer begins that counts as none, such as 'not "
            "found'. Default: only an empty answer is none."
        ),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="Device: auto (a GPU if there is one), cpu, cuda or cuda:N. Default: auto.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type: auto (the fastest that passes a check), float32, float16 or bfloat16. Default: auto."
        ),
    ] = None
    quantize: Annotated[
        Literal["int8"] | None,
        typer.Option(
            help="For text encoders: 8-bit integers in linear layers, if the outputs of a sample pass a check. "
            "Default: none."
        ),
    ] = None
    truncate_dim: Annotated[
        int | None,
        typer.Option(min=1, help="For embed: components to keep of a Matryoshka model's vectors. Default: all."),
    ] = None
    normalize: Annotated[
        bool, typer.Option("--normalize", help="For embed: scale each vector to length 1. Many models do so anyway.")
    ] = False
    output_dtype: Annotated[
        Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] | None,
        typer.Option(
            help="Type of a vector's numbers, for jobs: float32 or float16 for multi-vector-embed, all but float16 for "
            "embed. Servers of embed take it from each request. Default: float32."
        ),
    ] = None
    prompt_name: Annotated[
        str | None,
        typer.Option(help="For embed: the model's prompt before each text, such as query. Default: the model's own."),
    ] = None
    prompt: Annotated[
        str | None, typer.Option(help="For embed: text before each text, such as 'query: '. Default: --prompt-name.")
    ] = None
    labels: Annotated[
        str | None, typer.Option(help="For zero-shot: labels, such as sports,politics. Required there.")
    ] = None
    enforce_eager: Annotated[
        bool,
        typer.Option(
            "--enforce-eager",
            help="For text encoders on a GPU, and for vLLM: do without CUDA graphs. Default: use them.",
        ),
    ] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow Python code from the model folder to run.")
    ] = False
    allow_pickled_weights: Annotated[
        bool,
        typer.Option(
            "--allow-pickled-weights",
            help="Load weights in formats other than safetensors, which can run code, from a downloaded model, or in a "
            "server.",
        ),
    ] = False
    engine_process: Annotated[
        bool,
        typer.Option(
            "--engine-process",
            help="Run a batch engine in its own process, so that a crash fails only the record or request that "
            "caused it.",
        ),
    ] = False
    engine_timeout: Annotated[
        float | None,
        typer.Option(
            help="Maximum seconds for a batch, step or request; in a job, also for a --map or --finish call in a "
            "process, see docs/jobs.md. Default: no limit."
        ),
    ] = None

    def config(self, arguments: Sequence[str], meant: str = "") -> EngineConfig:
        """The engine configuration that the flags describe, for one model.

        Args:
            arguments: flags that the command does not know: options of the engine.
            meant: suggestion for a stray argument, with {} in its place.

        Raises:
            ConfigError: an argument is not a flag, or a flag is given twice.
        """
        if len(self.model or ()) > 1:
            raise ConfigError("--model is given twice; give it once")
        return EngineConfig(
            task=self.task,
            model=self.model[0] if self.model else None,
            engine=self.engine,
            engine_options=merged_options(self._options(), engine_options(arguments, meant)),
            batch_tokens=self.batch_tokens,
            batch_size=self.batch_size,
            engine_process=self.engine_process,
            engine_timeout_s=self.engine_timeout,
            pickled_weights=self.allow_pickled_weights,
        )

    def _options(self) -> dict[str, object]:
        given = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        if self.labels is not None:  # a list in JSON, for labels with commas
            given["labels"] = _value(self.labels) if self.labels.startswith("[") else self.labels
        if self.endpoint:
            given["endpoints"] = list(self.endpoint)
        return given | {name: True for name in _SWITCHES if getattr(self, name)}


class EngineCommand(Command):
    """A command that takes flags of engines, and lists those that have no line of their own in its help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        own = {flag for parameter in self.params for flag in parameter.opts}
        before = self.epilog
        self.epilog = "\n\n".join([more_flags(own), before or ""])
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = before


def more_flags(own: Collection[str]) -> str:
    """The flags of engines besides `own`, as paragraphs: by task, and by engine where only that one has them."""
    tasks = options_by_task()
    engines: dict[str, set[str]] = {}
    for known in tasks.values():
        for engine, options in known.items():
            for option in options:
                engines.setdefault(option, set()).add(engine)
    groups: dict[str, list[str]] = {}
    for task, known in tasks.items():
        default = next(iter(known))
        for engine, options in known.items():
            for option in options:
                alone = engine != default and engines[option] == {engine}
                groups.setdefault(f"--engine {engine}" if alone else task, []).append(as_flag(option))
    together: dict[tuple[str, ...], list[str]] = {}
    for group, flags in groups.items():
        if left := tuple(flag for flag in dict.fromkeys(flags) if flag not in own):
            together.setdefault(left, []).append(group)
    lines = [f"{', '.join(names)}: {' '.join(left)}" for left, names in together.items()]
    lines.sort(key=lambda line: line.startswith("--engine"))
    return "\n\n".join(["Flags of a task or an engine (docs/engines.md):", *lines, "--engine vllm: those of vLLM"])


def changed(config: EngineConfig, given: EngineConfig) -> EngineConfig:
    """A job's configuration, overridden by the values given on the command line."""
    default = EngineConfig()
    new = {
        name: getattr(given, name)
        for name in EngineConfig.__slots__
        if name != "engine_options" and getattr(given, name) != getattr(default, name)
    }
    if given.model is not None:
        config = replace(config, commit=None)  # of the job's model
    return replace(config, engine_options={**config.engine_options, **given.engine_options}, **new)


def engine_options(arguments: Sequence[str], meant: str = "") -> dict[str, object]:
    """`--max-num-seqs 64 --enforce-eager --no-enable-prefix-caching` as options of an engine.

    A value that is valid JSON (a number, list or object) is parsed; any other is text.

    Raises:
        ConfigError: an argument is not a flag, or a flag is given twice.
    """
    options: dict[str, object] = {}
    left = list(arguments)
    while left:
        flag = left.pop(0)
        if not flag.startswith("--") or flag == "--":
            hint = f"; did you mean {meant.format(flag)}"
            raise ConfigError(
                f"unexpected argument {flag!r}: flags begin with --, and a flag takes one value"
                + (hint if meant else "")
            )
        name, equals, text = flag.removeprefix("--").partition("=")
        value: object
        if equals:
            value = _value(text)
        elif left and not left[0].startswith("--"):
            value = _value(left.pop(0))
        else:
            value = not name.startswith("no-")
            name = name.removeprefix("no-")
        name = name.replace("-", "_")
        if name in options:
            raise ConfigError(f"{flag} is given twice; give it once")
        options[name] = value
    return options


def as_typed(arguments: Sequence[str], option: str) -> str:
    """The flag by which `option` was given, such as `--no-eager` for `eager`; its plain flag if there is none."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag[2:].removeprefix("no-").replace("-", "_") == option:
            return flag
    return as_flag(option)


def as_flag(option: str) -> str:
    """The flag of an engine's option."""
    return "--endpoint" if option == "endpoints" else "--" + option.replace("_", "-")


def unknown_flag(error: UnknownOptionError, arguments: Sequence[str], flags: Sequence[str]) -> str:
    """What to say of an unknown option that was given as a flag.

    Args:
        error: names the option.
        arguments: of the command line.
        flags: of the command, one of which may have been meant.
    """
    typed = as_typed(arguments, error.option)
    others = [flag for flag in flags if flag != typed]
    return f"{typed}: {error.place} has no such flag; {error.way_out(as_flag, others)}"


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
