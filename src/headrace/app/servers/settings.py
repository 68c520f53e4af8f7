"""Settings of a server. Imports little, for the command line reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from headrace.argument_types import named
from headrace.engines.choosing.config import EngineConfig
from headrace.events import Listener
from headrace.options import all_declared, option
from headrace.serving.limits import KeySettings, ServeLimits


@named()
@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server."""

    panel: ClassVar[str] = "Server"

    config: EngineConfig = field(default_factory=EngineConfig)
    """The model; its task defaults to that of the engine, else "embed"."""
    name: str | Sequence[str] | None = option(
        None,
        "Name of the model in requests, * for any; repeatable, answers have the first. Default: its folder's name.",
        flags=("--served-model-name",),
        several=True,
    )
    batch_timeout_s: float = option(
        0.002,
        "Milliseconds that an idle engine waits for more requests before it starts a batch.",
        flags=("--batch-timeout-ms",),
        scale=1000,
        shown="2.0",
        metavar="MILLISECONDS",
        minimum=0,
    )
    limits: ServeLimits = field(default_factory=ServeLimits)
    state: Path | None = option(
        None,
        "Folder for files and jobs of the Batch API. Default: no Batch API.",
        flags=("--state-dir",),
        brief="folder of the Batch API",
    )
    latency_target_s: float | None = option(
        None,
        "Milliseconds that requests may take while the Batch API runs. Default: no target.",
        flags=("--latency-target-ms",),
        scale=1000,
        metavar="MILLISECONDS",
        above=0,
    )
    keys: Sequence[KeySettings] = option((), "API keys; empty to accept all requests.", flags=())
    allowed_hosts: Sequence[str] | None = option(
        None,
        "Host name by which clients call the server, *.NAME or *; repeatable. Default: localhost names on a loopback "
        "address without keys and HTTPS, else all.",
        flags=("--allowed-host",),
        metavar="NAME",
        panel="Access",
    )
    listeners: Sequence[Listener] = option(
        (), "Functions that are called with each event of `headrace.events`. One that raises is left out.", flags=()
    )


SERVER_SETTINGS = (*(one.name for one in all_declared(ServerSettings)), "config", "limits")
"""Names to suggest for an unknown engine option."""
