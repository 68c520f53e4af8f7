"""The names by which requests choose a model and its adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engines.choosing import registry
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.resolving import served_names
from headrace.errors import ConfigError, RecordError, nearest
from headrace.wording import shown

ANY_NAME = "*"
"""Stands for all names."""
OLLAMA_TAG = ":latest"
"""Ollama's default tag: its clients may send a name with or without it."""


def is_nameless(name: object) -> bool:
    """Whether it is what clients of Text Generation Inference send instead of a name; for Node, the address."""
    return isinstance(name, str) and (name in ("tgi", "dummy") or name.startswith(("http://", "https://")))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a server or a job, as requests name it."""

    names: tuple[str, ...]
    """Names that `/v1/models` lists; the first is the name in answers."""
    commit: str | None = None
    """The version of a downloaded model."""
    unlisted: tuple[str, ...] = ()
    """Other names that requests may give; `ANY_NAME` for all."""
    adapters: tuple[str, ...] = ()
    """Those of `names` that are of its adapters."""

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]

    @property
    def accepted(self) -> tuple[str, ...]:
        """All names that requests may give, besides what `is_nameless`."""
        return (*self.names, *self.unlisted)

    def answers(self, name: str | None) -> bool:
        """Whether it answers requests for this name."""
        return name is None or name in self.accepted or is_nameless(name) or ANY_NAME in self.unlisted

    def refusal(self, request: object) -> RecordError | None:
        """Why it does not answer this record of a job: a request body that names another model; None if it does."""
        name = request.get("model") if isinstance(request, dict) else None
        if self.answers(name):
            return None
        hint = nearest(name[:60], self.accepted) if isinstance(name, str) else ""
        known = " and ".join(map(repr, self.names))
        return RecordError(
            f"there is no model {shown(name, 200)}; the model and its adapters are {known}{hint}",
            param="model",
            code="model_not_found",
        )

    def named(self, asked: str | None) -> str:
        """The name in the answer to a request for this name."""
        return asked if asked in self.adapters else self.name

    def given(self, asked: str | None, records: Sequence[object]) -> Sequence[object]:
        """The records of a request for this name, which say its adapter."""
        if asked not in self.adapters:
            return records
        bodies = (
            one if isinstance(one, dict) else {"messages" if isinstance(one, list) else "prompt": one}
            for one in records
        )
        return [{**body, "model": asked} for body in bodies]


def served_model(given: str | Sequence[str] | None, config: EngineConfig) -> ServedModel:
    """The names of the model and its adapters, and its version.

    Raises:
        ConfigError: a name is empty, or an adapter has the model's.
    """
    names = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if given is not None and (not names or not all(names)):
        raise ConfigError(f"the name of the served model is {given!r}; it must not be empty (``name``)")
    anything = (ANY_NAME,) if ANY_NAME in names else ()
    others: Sequence[str] = ()
    if not (own := tuple(name for name in dict.fromkeys(names) if name != ANY_NAME)):
        task = config.task or ""
        name, *others = served_names(config) or (registry.default_model(task, config.engine) or task,)
        own = (name,)
    if doubled := {*own, *others}.intersection(config.adapters):
        raise ConfigError(
            f"``adapters`` has the name {min(doubled)!r}, which is the model's: choose another, or give the "
            "model of a server one (``name``)"
        )
    untagged = tuple(name.removesuffix(OLLAMA_TAG) for name in own if name.endswith(OLLAMA_TAG))
    return ServedModel((*own, *config.adapters), config.commit, (*others, *untagged, *anything), config.adapters)
