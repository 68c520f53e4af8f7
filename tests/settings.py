"""Settings of jobs and servers from flat keywords: those of the engine go into its `EngineConfig`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from headrace.engines.choosing.config import EngineConfig
from headrace.jobs.settings import JobSettings

if TYPE_CHECKING:
    from headrace.app.servers.server import ServerSettings


def split(given: dict[str, Any]) -> tuple[EngineConfig, dict[str, Any]]:
    """What concerns the engine, and the rest."""
    names = {field.name for field in fields(EngineConfig)}
    config = EngineConfig(**{name: value for name, value in given.items() if name in names})
    return config, {name: value for name, value in given.items() if name not in names}


def job_settings(source: Any, sink: Any, **given: Any) -> JobSettings:
    """A job's."""
    config, rest = split(given)
    return JobSettings(source, sink, config, **rest)


def server_settings(**given: Any) -> ServerSettings:
    """A server's."""
    from headrace.app.servers.server import ServerSettings

    config, rest = split(given)
    return ServerSettings(config, **rest)
