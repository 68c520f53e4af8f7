"""The tools that a request offers to a model, and how much the model may choose among them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.engines.requests.structure import check_parts
from headrace.errors import RecordError, nearest
from headrace.records import Json
from headrace.wording import shown

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
"""The fields of a request body that say it."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_EXAMPLE = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request."""

    given: tuple[Json, ...]
    """As OpenAI's API has them, which is how chat templates take them."""
    forced: tuple[str, ...] = ()
    """The tools of which the answer must call one; empty if it may call none."""
    single: bool = False
    """Whether the answer may have one call at most."""

    @property
    def schemas(self) -> Mapping[str, Json]:
        """The schema of each tool's arguments, by the name of the tool."""
        functions = (tool["function"] for tool in self.given)
        return {one["name"]: one.get("parameters") or {"type": "object"} for one in functions}


def tools_in(body: Mapping[str, object], default: ToolUse | None = None) -> ToolUse | None:
    """The tools of a request body, else the default ones; None where the model may call none.

    Raises:
        RecordError: a tool or the choice has another shape, or the choice names no tool of the body.
    """
    given: Json = body.get("tools")
    use = ToolUse(checked_tools(given)) if given else default
    choice: Json = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        forced: tuple[str, ...] | None = None
    elif use is None:
        raise RecordError(f"tool_choice is {shown(choice)}, and there are no tools: give tools", param="tool_choice")
    else:
        forced = _forced(choice, list(use.schemas))
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise RecordError(
            f"parallel_tool_calls is {shown(parallel)}: it must be true or false", param="parallel_tool_calls"
        )
    if use is None or choice == "none":
        return None
    single = use.single if parallel is None else not parallel
    return ToolUse(use.given, use.forced if choice is None else forced or (), single)


def checked_tools(given: Json) -> tuple[Json, ...]:
    """The tools of a request, checked. Raises RecordError: a tool has another shape, or two have one name."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RecordError(f"tools is {shown(given)}: it must be a list, such as [{_EXAMPLE}]", param="tools")
    names: set[str] = set()
    for number, tool in enumerate(given):
        place = f"tools.{number}"
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise RecordError(f"{place} is {shown(tool)}: it must be as in {_EXAMPLE}", param=place)
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RecordError(
                f"{place} has the name {shown(name, 60)}: it must be letters, digits, dots, _ and -, at most 256",
                param=f"{place}.function.name",
            )
        if name in names:
            raise RecordError(f"two tools have the name {name!r}; give each its own", param=f"{place}.function.name")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RecordError(
                f"{place} has the parameters {shown(parameters)}: they must be a JSON schema",
                param=f"{place}.function.parameters",
            )
        check_parts(parameters, f"{place}.function.parameters")
        names.add(name)
    return tuple(dict(tool) for tool in given)


def _forced(choice: Json, names: Sequence[str]) -> tuple[str, ...]:
    """The tools of which one must be called. Raises RecordError: the choice has another shape, or names no tool."""
    if choice == "required":
        return tuple(names)
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise RecordError(
            f"tool_choice is {shown(choice)}: it must be auto, none, required, or "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if name not in names:
        raise RecordError(
            f"tool_choice names {shown(name, 60)}, which is not among the tools {', '.join(names)}"
            f"{nearest(str(name)[:60], names)}",
            param="tool_choice",
        )
    return (name,)
