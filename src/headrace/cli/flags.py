"""Flags of commands, made from declared settings.

A parameter of a command whose type is a dataclass of settings becomes their flags, and is the object that they make.
One of type `Given[...]` makes the object later, where the command can say what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from headrace.app.settings_file import read_settings
from headrace.argument_types import build, check_value, comma_separated, parts, read, scaled
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import declared_engines
from headrace.errors import ConfigError, nearest
from headrace.jobs.settings import FILES_PANEL
from headrace.options import Declared, all_declared, declared
from headrace.wording import flag_of, speak, spelled

T = TypeVar("T")
ClickContext: TypeAlias = Any
"""click's, which newer versions of typer hold a copy of."""
ClickFormatter: TypeAlias = Any
"""click's formatter of help pages, of the same copy."""

ENGINE_PANEL = EngineConfig.panel
ACCESS_PANEL = "Access"
_ONCE = frozenset({ENGINE_PANEL, ACCESS_PANEL, FILES_PANEL, "Records"})
"""Panels of flags that are refused if given twice: one would silently not count, such as an input or a file of keys."""


_JSON_LIST = """a list in JSON, such as '["a", "b"]'"""


@dataclasses.dataclass(frozen=True, slots=True)
class Given(Generic[T]):
    """What was given for settings by flags or environment variables."""

    kind: type[T]
    values: Mapping[str, Any]
    """As typer reads them; None for what was not given."""

    def build(self, **more: object) -> T:
        """The object.

        Args:
            more: settings that are no flags, and objects of some that are.

        Raises:
            ConfigError: a value cannot be used.
        """
        made = {one.name for value in more.values() if dataclasses.is_dataclass(value) for one in flags_of(type(value))}
        wanted = (one for one in flags_of(self.kind) if one.name not in made)
        given = {one.name: found for one in wanted if (found := self._read(one)) is not None}
        return build(self.kind, {**given, **more})

    def engine_options(self) -> dict[str, object]:
        """The options of engines that have flags of their own."""
        return {one.name: found for one in engine_flags() if (found := self._read(one)) not in (None, False)}

    def _read(self, one: Declared) -> object:
        value = self.values.get(one.name)
        if isinstance(value, list):
            return value[0] if one.option.repeatable and value else tuple(value) or None
        return read(one, value) if one.option.parse is not None and isinstance(value, str) else scaled(one, value)


_MOST_FLAGS = 24
"""Flags of a command whose help is short enough as a whole."""
_WHOLE, _TYPED = "headrace.help_all", "headrace.typed"


def _show_whole_help(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[_WHOLE] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all",
            is_eager=True,
            callback=_show_whole_help,
            help="Show all flags, also those of tasks and engines, and exit.",
        ),
    ],
)


def with_settings(command: Callable[..., int], only: Collection[str] | None = None) -> Callable[..., int]:
    """Expand each parameter of a command that is an object of settings into one parameter per flag.

    The command returns its exit status; what it raises becomes one: see `outcome.guarded`.

    Args:
        only: of a `Given`, the settings that the command takes, beside those of the engine; None for all.
    """
    hints = get_type_hints(command, include_extras=True)
    plain: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[object], bool]] = {}
    found: dict[str, Declared] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        kind = get_args(hint)[0] if get_origin(hint) is Given else hint
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            groups[parameter.name] = kind, kind is not hint
            wanted = only if kind is not hint else None
            every = [
                one
                for one in _in_help(kind)
                if one.name not in found and (wanted is None or one.name in wanted or one.option.panel == ENGINE_PANEL)
            ]
            found |= {one.name: one for one in every}
            plain += map(_parameter, every)
        else:
            plain.append(parameter.replace(annotation=hint))
    if len(found) > _MOST_FLAGS and any(one.option.brief for one in found.values()):
        plain.append(_HELP_ALL)
    plain = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in plain]

    @functools.wraps(command)
    def expanded(**given: object) -> int:
        given.pop(_HELP_ALL.name, None)
        values = {name: given.pop(name) for name in found}
        for name, (kind, later) in groups.items():
            one = Given(kind, values)
            given[name] = one if later else one.build()
        return command(**given)

    expanded.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]  # what typer reads
    expanded.__annotations__ = {one.name: one.annotation for one in plain}
    expanded.settings = found  # type: ignore[attr-defined]  # for messages about them
    return expanded


def flags_of(kind: type) -> list[Declared]:
    """The settings of a dataclass that have flags, those of its groups among them."""
    return [one for one in all_declared(kind) if one.flags]


def _in_help(kind: type) -> Iterable[Declared]:
    """The same, with the options of engines in the place of `engine_options`."""
    for one in all_declared(kind):
        yield from engine_flags() if one.name == "engine_options" else [one] if one.flags else []


@functools.cache
def engine_flags() -> tuple[Declared, ...]:
    """The options of engines that have a flag of their own in `--help`; none is given by default."""
    found: dict[str, Declared] = {}
    for one in (one for kind in declared_engines() for one in declared(kind) if one.option.panel == ENGINE_PANEL):
        first = found.get(one.name, one)
        kind = first.kind | one.kind
        found[one.name] = Declared(one.name, kind, False if bool in parts(kind) else None, first.option)
    return tuple(found.values())


def _parameter(one: Declared) -> inspect.Parameter:
    default = inspect.Parameter.empty if one.required else one.option.shown or one.default
    if one.option.parse is not None and one.option.shown is None:
        default = None
    if default == ():
        default = None
    kind = _kind(one)
    text = spelled(one.option.help, "flags")
    limits: Any = {"min": one.option.minimum, "max": one.option.maximum} if kind in (int, float) else {}
    info = typer.Option(*one.flags, help=text, rich_help_panel=one.option.panel, metavar=one.option.metavar, **limits)
    hint: object = Annotated[kind | None if default is None else kind, info]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _takes_several(one: Declared) -> bool:
    """Whether typer makes a list of its flags."""
    return bool(_kind(one) == list[str])


def _kind(one: Declared) -> Any:
    if one.option.repeatable or one.option.several:
        return list[str]
    if one.option.parse is not None:
        return str
    kinds = [kind for kind in parts(one.kind) if kind is not NoneType]
    choices = tuple(dict.fromkeys(value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)))
    if choices:
        return Literal[choices]
    simple = next((kind for kind in kinds if kind in (bool, int, float, str, Path)), None)
    several = any(get_origin(kind) is not None and get_args(kind)[:1] == (str,) for kind in kinds)
    return simple or (list[str] if several else str)


def positive_numbers(name: str, text: str | None) -> tuple[int, ...]:
    """The numbers of a setting such as 8,32, each once, in ascending order.

    Raises:
        ConfigError: one of them is not a whole number above 0.
    """
    words = comma_separated(text or "")
    for word in words:
        if not (word.isascii() and word.isdecimal() and int(word) > 0):
            raise ConfigError(f"``{name}={text}``: {word!r} is not a whole number above 0")
    return tuple(sorted(map(int, words)))


def given_twice(flag: str, meant: Iterable[Declared]) -> str:
    """The refusal of a second `flag`, which says how a list is given if that is what these settings take."""
    lists = (one for one in meant if any(get_args(kind) in ((str,), (str, ...)) for kind in parts(one.kind)))
    how = next((f", as {'a,b' if one.option.parse else _JSON_LIST}" for one in lists), "")
    return f"{flag} is given twice; give it once{how}"


def option_of(argument: str) -> str:
    """The setting that an argument of the command line may name."""
    return argument.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")


class Command(TyperCommand):
    """A command that refuses a flag of some panels given twice; for other flags the last value counts.

    A value that a setting does not take is refused in the same words as from Python or a file.
    """

    by_environment = False
    """Whether environment variables give its flags, too."""

    def format_help(self, ctx: ClickContext, formatter: ClickFormatter) -> None:
        """Write the help: one screen of a command with many flags, unless all are asked for."""
        if any(one.name == _HELP_ALL.name for one in self.params) and _WHOLE not in ctx.meta:
            self._format_brief(ctx, formatter)
            return
        before = self.epilog
        self.epilog = "\n\n".join(filter(None, [self.all_flags(), before]))
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = before

    def _format_brief(self, ctx: ClickContext, formatter: ClickFormatter) -> None:
        own, rows = self.settings, []
        for one in self.get_params(ctx):
            text = own[one.name].option.brief if one.name in own else getattr(one, "help", None)
            if text:
                long = next((name for name in one.opts if name.startswith("--")), one.opts[0])
                rows.append((", ".join([*(name for name in one.opts if len(name) == 2), long]), text))
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text((self.help or "").partition("\n\n")[0])
        formatter.write_paragraph()
        formatter.write_dl(rows)
        for heading, flags in self.flags_for(ctx.meta.get(_TYPED, {})):
            formatter.write_paragraph()
            formatter.write_text(heading)
            formatter.write_paragraph()
            formatter.write_dl(flags)
        _, title, examples = (self.epilog or "").partition("Examples:\n")
        formatter.write("\n" + title + examples.replace("\n\n", "\n"))

    def flags_for(self, typed: Mapping[str, object]) -> Iterable[tuple[str, list[tuple[str, str]]]]:  # noqa: ARG002
        """Further flags that the brief help shows: a heading, and each flag with its help.

        Args:
            typed: the flags beside `--help`, by the names of their settings.
        """
        return ()

    def all_flags(self) -> str:
        """What the whole help says of flags that are none of its parameters."""
        return ""

    def parse_args(self, ctx: ClickContext, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            BadParameter: a value is not valid.
            Exit: a flag that counts once is given twice, or a value is of no use to its setting.
        """
        variables = from_environment(self.settings, self.more_variables()) if self.by_environment else {}
        ctx.default_map = {name: value for name, (_, value) in variables.items()}
        typed, left, order = self.make_parser(ctx).parse_args(args=list(args))
        typed_names = {*typed, *map(option_of, left)}
        ctx.meta[_TYPED] = typed
        try:
            filed = self.from_file({**ctx.default_map, **typed})
        except ConfigError as error:
            raise _refused(str(error)) from error
        beside: dict[str, tuple[str, object]] = {**filed, **variables}
        beside = {name: found for name, found in beside.items() if name not in typed_names}
        speak("flags", {name: (place, _text(value)) for name, (place, value) in beside.items()})
        values = {name: value for name, (_, value) in beside.items() if self._is_value(name, value)}
        for name, value in values.items():
            self._check(name, value)
        texts = {name: value for name, (_, value) in beside.items() if name not in values}
        ctx.default_map = dict(texts)
        texts |= typed
        try:
            left = super().parse_args(ctx, list(args))  # reports other errors first
        except typer.BadParameter as error:
            name = str(getattr(error.param, "name", ""))
            if name in self.settings and type(error).__name__ != "MissingParameter":
                self._check(name, _text(texts.get(name)))
                raise _refused(f"{spelled(f'``{name}``')}: {error.message}") from error
            raise
        for name, text in texts.items():
            if isinstance(text, str) and name in self.settings and bool not in parts(self.settings[name].kind):
                self._check(name, text)
        ctx.params |= values
        if filed:
            ctx.params["config"] = None  # no file of steps
        more = (one for one in beside.items() if one[0] not in self.settings)
        ctx.args += [f"{flag_of(name)}={_text(value)}" for name, (_, value) in more]
        for parameter, times in Counter(order).items():
            once = getattr(parameter, "rich_help_panel", None) in _ONCE
            if times > 1 and once and not getattr(parameter, "multiple", False):
                flag = next((flag for flag in parameter.opts if flag in args), parameter.opts[0])
                raise _refused(
                    given_twice(flag, [one for name, one in self.settings.items() if name == parameter.name])
                )
        return left

    @property
    def settings(self) -> Mapping[str, Declared]:
        found: Mapping[str, Declared] = getattr(self.callback, "settings", {})
        return found

    def _check(self, name: str, value: object) -> None:
        try:
            if isinstance(value, str):
                read(self.settings[name], value)
            else:
                check_value(self.settings[name], value)
        except ConfigError as found:
            raise _refused(str(found)) from found

    def _is_value(self, name: str, value: object) -> bool:
        """Whether it is a value of a file, which is used as it is, and no text as of a flag, or several."""
        texts = (
            value
            if isinstance(value, list) and name in self.settings and _takes_several(self.settings[name])
            else [value]
        )
        return name in self.settings and not all(isinstance(text, str) for text in texts)

    def from_file(self, given: Mapping[str, object]) -> Mapping[str, tuple[str, object]]:  # noqa: ARG002
        """Settings of a file that flags or variables name, each with the name of the file; none by default.

        Raises:
            ConfigError: the file cannot be read, or has a setting that the command does not know.
        """
        return {}

    def more_variables(self) -> Mapping[str, str]:
        """Variables of settings that have no flag of their own, each with its setting."""
        return {}


def _text(value: object) -> str:
    return str(value[-1] if isinstance(value, list | tuple) else value)


def filed(settings: Mapping[str, Declared], path: Path) -> dict[str, tuple[str, object]] | None:
    """The settings in a YAML or JSON file of keys and values, each with its file; None if it has steps.

    A text is that of a flag; any other value is as in Python, and JSON for options of engines, as other keys are.

    Raises:
        ConfigError: the file cannot be read.
    """
    content = read_settings(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f'{path} must be a mapping of settings, such as task: embed, or of "steps", a list')
    if {"steps", "model_column"} & set(content):
        return None
    flags = {flag[2:].replace("-", "_"): name for name, one in settings.items() for flag in one.option.flags or ()}
    found: dict[str, tuple[str, object]] = {}
    for key, value in content.items():
        word = str(key).replace("-", "_")
        name = flags.get(word, word)
        if value is not None:
            found[name] = f"{path}: {key}", _from_key(settings.get(name), value)
    return found


def _from_key(one: Declared | None, value: object) -> object:
    """A value of a file, as `Command` takes it for this setting; None for one that has no flag."""
    if one is not None and isinstance(value, str):
        return [value] if _takes_several(one) else value
    if one is None or object in parts(one.kind):
        return value if isinstance(value, str) else json.dumps(value, default=str)
    has_tuple = any(get_origin(kind) is tuple for kind in parts(one.kind))
    return tuple(value) if isinstance(value, list) and has_tuple else value


def _refused(message: str) -> typer.Exit:
    print(f"headrace: {message}", file=sys.stderr)
    return typer.Exit(2)


_PREFIX = "HEADRACE_"
_KUBERNETES = ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_TCP_PROTO", "_TCP_PORT", "_TCP_ADDR")
"""How the variables end that Kubernetes sets for a service named headrace; HEADRACE_PORT is another."""
_OTHERS = frozenset({"HEADRACE_API_KEY", "HEADRACE_API_KEYS"})
"""Secrets, of a client and of a server; no flag has them."""


def from_environment(
    settings: Mapping[str, Declared], more: Mapping[str, str]
) -> dict[str, tuple[str, str | list[str]]]:
    """The variable of each setting that has one, and its value; warns of a name that is nearly one of these.

    Args:
        more: variables of other settings, each with its setting.

    Raises:
        Exit: a setting is given by two variables.
    """
    known = {**more, **{variable: one.name for one in settings.values() for variable in one.variables}}
    found: dict[str, tuple[str, str | list[str]]] = {}
    for variable, value in os.environ.items():
        if not variable.startswith(_PREFIX) or variable in _OTHERS:
            continue
        if variable.endswith(_KUBERNETES) or (variable == "HEADRACE_PORT" and value.startswith("tcp://")):
            continue
        if (name := known.get(variable)) is None:
            close = [one for one in (*known, *_OTHERS) if nearest(variable[len(_PREFIX) :], [one[len(_PREFIX) :]])]
            if close:
                hint = nearest(variable, close)
                print(f"headrace: WARNING: the environment variable {variable} is unknown{hint}", file=sys.stderr)
            continue
        if name in found:
            raise _refused(f"{found[name][0]} and {variable} give the same setting; keep one of them")
        several = name in settings and _takes_several(settings[name])
        found[name] = variable, (value.split() if several else value)
    return found
