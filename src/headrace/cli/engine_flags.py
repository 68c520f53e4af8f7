"""Flags of an engine, declared once for every command that has one; unknown ones are the engine's own options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import typer

from headrace.cli.flags import ENGINE_PANEL, FlagGroup
from headrace.engines.config import EngineConfig, merged_options
from headrace.engines.registry import known_tasks
from headrace.errors import ConfigError, nearest

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that hands unknown flags to the engine."""

# Flags that are options of the engine, under the same name.
_OPTIONS = ("handler", "max_model_len", "on_too_long", "device", "dtype", "truncate_dim")


@dataclass(frozen=True, slots=True)
class EngineFlags(FlagGroup):
    """What an `EngineConfig` is made of."""

    panel: ClassVar[str] = ENGINE_PANEL

    task: Annotated[
        str | None,
        typer.Option(
            help=f"What the model does: {', '.join(known_tasks())}. Default: what an OpenAI batch file asks for, "
            "else embed."
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="A local model folder, or the name of a small included model: all-MiniLM-L6-v2 (default for embed), "
            "arithmetic (default for generate), docstrings, digits."
        ),
    ] = None
    engine: Annotated[str | None, typer.Option(help="onnx, vllm, or module:name of your own. Default: the task's.")] = (
        None
    )
    handler: Annotated[str | None, typer.Option(help="A TorchServe handler to run: a .py file or a .mar archive.")] = (
        None
    )
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="The address of a server with OpenAI's API that does the inference. Repeat it for several servers."
        ),
    ] = None
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens in a batch, padding included. Default: the engine's.")
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Maximum records in a batch. Default: the engine's.")
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens in a text. Default: the model's own limit.")
    ] = None
    on_too_long: Annotated[
        Literal["truncate", "error"] | None,
        typer.Option(help="Cut a text that is too long for the model, or fail its record. Default: truncate."),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N. Default: auto, a GPU if there is one.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32, float16 or bfloat16. Default: auto, float32 on CPUs, else the weights' own."),
    ] = None
    truncate_dim: Annotated[
        int | None, typer.Option(min=1, help="For embed: keep the first components of a Matryoshka model's vectors.")
    ] = None
    labels: Annotated[str | None, typer.Option(help="For zero-shot: the labels, such as sports,politics.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the model's folder.")
    ] = False
    engine_process: Annotated[
        bool,
        typer.Option(
            "--engine-process",
            help="Run the engine in its own process, so that a crash of the model costs only the record that caused "
            "it. For engines that run batches.",
        ),
    ] = False
    engine_timeout: Annotated[
        float | None,
        typer.Option(
            help="Maximum seconds for a batch, step or request of the engine, and for a call of --map or --finish in a "
            "process; see docs/jobs.md for what happens then."
        ),
    ] = None

    def config(self, arguments: Sequence[str], meant: str = "") -> EngineConfig:
        """What the flags say.

        Args:
            arguments: what the command does not know itself: options of the engine.
            meant: what may have been meant by a stray argument, with {} in its place.

        Raises:
            ConfigError: an argument that is no flag, or a flag given twice.
        """
        return EngineConfig(
            task=self.task,
            model=self.model,
            engine=self.engine,
            engine_options=merged_options(self._options(), engine_options(arguments, meant)),
            batch_tokens=self.batch_tokens,
            batch_size=self.batch_size,
            engine_process=self.engine_process,
            engine_timeout_s=self.engine_timeout,
        )

    def _options(self) -> dict[str, object]:
        given = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        if self.labels is not None:  # a list in JSON, for labels with commas
            given["labels"] = _value(self.labels) if self.labels.startswith("[") else self.labels
        if self.endpoint:
            given["endpoints"] = list(self.endpoint)
        if self.trust_remote_code:
            given["trust_remote_code"] = True
        return given


def changed(config: EngineConfig, given: EngineConfig) -> EngineConfig:
    """A job's configuration with what is given on the command line in its place."""
    default = EngineConfig()
    new = {
        name: getattr(given, name)
        for name in EngineConfig.__slots__
        if name != "engine_options" and getattr(given, name) != getattr(default, name)
    }
    return replace(config, engine_options={**config.engine_options, **given.engine_options}, **new)


def engine_options(arguments: Sequence[str], meant: str = "") -> dict[str, object]:
    """`--max-num-seqs 64 --enforce-eager --no-enable-prefix-caching` as options of an engine.

    A value that is JSON (a number, a list, an object) is read as that, any other is text.

    Raises:
        ConfigError: something that is no flag, or a flag given twice.
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
    return "--" + option.replace("_", "-")


def suggestion(typed: str, flags: Sequence[str]) -> str:
    """Which of the flags may have been meant, as the end of a sentence; nothing where none is like it."""
    return nearest(as_flag(typed.lstrip("-")), [flag for flag in flags if flag != typed])


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
