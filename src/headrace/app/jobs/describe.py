"""What a run is, in words, for its report: settings and versions, without secrets."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from headrace.app.jobs.plan import Plan
from headrace.device.cuda import cuda_devices
from headrace.engines.base import Engine
from headrace.engines.choosing import registry
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.profile import EngineProfile
from headrace.events import RunDescribed
from headrace.io.formats.jsonl import JsonlWriter
from headrace.io.storage.locations import as_named
from headrace.observe.live.server import ServerFacts
from headrace.observe.reporting.run_facts import RunFacts

_LIBRARIES = ("torch", "transformers", "sentence_transformers", "vllm", "onnxruntime", "pyarrow", "ray")
_SECRET = re.compile(r"key|secret|password|credential|auth|(^|_)token$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """How many workers a job could have."""

    setting: str
    """What sets their number."""
    most: int
    """That the devices have room for, those of the job included."""


def describe(plan: Plan, engine: Engine, profile: EngineProfile, began: float) -> RunDescribed:
    """The settings of a job that matter for its speed, and the versions of what runs it."""
    settings, limits = plan.settings, plan.settings.limits
    config = settings.config
    source = settings.source if isinstance(settings.source, (str, os.PathLike)) else type(settings.source).__name__
    named: dict[str, object] = {
        "input": source,
        "output": plan.output.target,
        **_of_engine(config, engine, profile),
        **({"batch size limit": None} if profile.sizes_steps else {}),  # the job finds it
        "workers": limits.workers or "auto",
        "prepare_processes": "auto" if limits.prepare_processes is None else limits.prepare_processes,
        "buffer memory": f"{limits.buffer_memory / 1e6:,.0f} MB",
        "map": settings.prepare,
        "finish": settings.finish,
        "retry of failed records": "yes" if settings.retry else None,
    }
    shown = {name: _shown(name, value) for name, value in named.items() if value is not None}
    return RunDescribed(remove_logins(as_named(plan.output.target)), shown, versions(), began)


def server_facts(config: EngineConfig, engine: Engine, profile: EngineProfile, most_records: int) -> ServerFacts:
    """The settings of a server that matter for its speed, and the versions of what runs it."""
    named = {**_of_engine(config, engine, profile), "accepted records at most": f"{most_records:,}"}
    shown = {name: _shown(name, value) for name, value in named.items() if value is not None}
    return ServerFacts(shown, versions(), counts_tokens=profile.counts_tokens)


def _of_engine(config: EngineConfig, engine: Engine, profile: EngineProfile) -> dict[str, object]:
    described = engine.describe()
    found = described.get("options")  # such as those that `headrace tune` found for vLLM
    options = {**(found if isinstance(found, Mapping) else {}), **config.engine_options}
    return {
        "task": config.task,
        "model": config.model or "(default)",
        "engine": config.engine if isinstance(config.engine, (str, type(None))) else repr(config.engine),
        "device": described.get("device"),
        "dtype": described.get("dtype"),
        "batch cost limit": f"{profile.batch_cost:,.0f} {profile.cost_unit}" if profile.batch_cost else None,
        "batch size limit": profile.batch_size or profile.max_in_flight or None,
        **{f"engine option {name}": value for name, value in options.items()},
    }


def host_of(plan: Plan, profile: EngineProfile, workers: WorkerRoom | None, preparers: int | None) -> RunFacts:
    """What a run has for its host stages, the limits of its batches, and the devices that it leaves alone."""
    limits = plan.settings.limits
    return RunFacts(
        cores=os.cpu_count() or 1,
        workers=limits.workers,
        preparers=preparers,
        batch_size=profile.batch_size,
        batch_cost=profile.batch_cost,
        counts_tokens=profile.counts_tokens,
        buffer_memory=limits.buffer_memory,
        slots=0 if profile.sizes_steps else profile.slots,
        maps=plan.user.prepares,
        finishes=plan.user.finishes,
        text_output=isinstance(plan.output.writer, JsonlWriter),
        replicas=_replicas(plan.settings.config) if workers is None else workers.most,
        replicas_setting=workers.setting if workers is not None else "data_parallel_size",
        keeps_order=plan.settings.order == "input",
    )


def _replicas(config: EngineConfig) -> int:
    """How many engines like this one the CUDA devices have room for; 1 where it cannot run on workers."""
    if config.engine_process or registry.is_remote(config.engine):
        return 1
    device = str(config.engine_options.get("device") or "auto")
    if device not in ("auto", "cuda") or not isinstance(config.engine, (str, type(None))):
        return 1
    devices = cuda_devices() if "torch" in sys.modules else 0  # an engine on a GPU has imported it
    return max(devices // config.devices, 1)


def _shown(name: str, value: object) -> str:
    if _SECRET.search(name):
        return "(not shown)"
    return remove_logins(value)[:_LONGEST]


def remove_logins(value: object) -> str:
    """Text without the user names and passwords of addresses in it."""
    return _LOGIN.sub("", str(value))


def versions() -> dict[str, str]:
    """The versions of Headrace, Python and the libraries in use, and the machine."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    found = {"headrace": _version("headrace") or "", "python": platform.python_version(), "machine": machine}
    for name in _LIBRARIES:
        if name in sys.modules and (installed := _version(name)) is not None:
            found[name] = installed
    return found


@functools.cache
def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
