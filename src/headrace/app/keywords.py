"""The settings of jobs and servers as keywords. Written by scripts/setting_keywords.py: do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from headrace.engines.keywords import EngineKeywords, LocalKeywords

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from headrace.engines.choosing.config import EngineChoice
    from headrace.events import Listener
    from headrace.io.formats.strict_json import OnNan
    from headrace.io.sources.selection import Selection
    from headrace.jobs.settings import FinishFn, Limits, OnEmpty, Order, PrepareFn, WorkerKind
    from headrace.serving.limits import KeySettings, ServeLimits


class ConfigKeywords(LocalKeywords, total=False):
    """Settings of any engine, and the options of those in this process."""

    engine: str | Callable[..., object] | EngineChoice | None
    engine_options: Mapping[str, object] | None
    batch_tokens: int | None
    batch_size: int | None
    engine_process: bool
    engine_timeout_s: float | None
    pickled_weights: bool


class LoadKeywords(ConfigKeywords, EngineKeywords, total=False):
    """Settings of a loaded model."""


class JobKeywords(TypedDict, total=False):
    """Settings of a job, without those of its model."""

    limits: Limits | None
    selection: Selection | None
    input_format: str | None
    input_delimiter: str | None
    input_encoding: str | None
    output_format: str | None
    sql: str | None
    on_nan: OnNan
    on_empty: OnEmpty
    overwrite: bool
    ignore_changes: bool
    text_column: str | None
    text_pair_column: str | None
    documents_column: str | None
    id_column: str | None
    prompt_template: str | Sequence[Mapping[str, object]] | None
    output_schema: object
    answer_regex: str | None
    choices: str | tuple[str, ...]
    schema_in_prompt: bool
    reask: int
    n: int
    best_of: int | None
    keep_columns: str | Sequence[str]
    flatten: str | Sequence[str]
    dedupe: bool | None
    order: Order
    prepare: PrepareFn | str | None
    finish: FinishFn | str | None
    worker_kind: WorkerKind
    trace: Path | str | None
    retry: bool
    listeners: Sequence[Listener]
    limit: int | None
    sample: float | None
    sample_seed: int
    shard: str | tuple[int, int] | None
    max_error_rate: float
    max_errors: int | None
    max_attempts: int
    retry_wait_s: float
    workers: str | int | None
    prepare_processes: str | int | None
    buffer_memory: str | int
    part_records: str | int | None
    commit_interval_s: float


class RunKeywords(LoadKeywords, JobKeywords, total=False):
    """Settings of a job."""

    steps: Sequence[Mapping[str, object]] | None
    model_column: str | None
    task: str | None


class ServeOptions(TypedDict, total=False):
    """Settings of a server of a loaded model but its name."""

    limits: ServeLimits | None
    keys: Sequence[KeySettings]
    allowed_hosts: Sequence[str] | None
    listeners: Sequence[Listener]
    max_wait_s: float
    max_requests: int
    max_cost: float | None
    max_waiting_bytes: str | int
    max_body_bytes: str | int
    max_file_bytes: str | int
    max_header_bytes: str | int
    max_prompts: int
    max_prompt_chars: int
    timeout_s: float
    body_timeout_s: float
    keep_alive_s: int
    write_timeout_s: float
    drain_s: float


class ServeKeywords(ServeOptions, total=False):
    """Settings of a server of a loaded model."""

    name: str | Sequence[str] | None


class ServerOptions(ConfigKeywords, ServeOptions, total=False):
    """Settings of a server but its name."""

    batch_timeout_s: float
    state: str | Path | None
    latency_target_s: float | None


class ServerKeywords(ServerOptions, EngineKeywords, total=False):
    """Settings of a server."""

    name: str | Sequence[str] | None
