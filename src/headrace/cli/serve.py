"""`headrace serve`: serve a model over HTTP."""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from headrace.cli.cluster_flags import cluster_at
from headrace.cli.engine_flags import EngineFlags
from headrace.cli.flags import ACCESS_PANEL, FlagGroup, with_groups
from headrace.cli.logs import LogFlags
from headrace.cli.outcome import guarded, say
from headrace.engines.choosing.resolving import resolve
from headrace.errors import ConfigError, MissingExtraError
from headrace.wording import speak

if TYPE_CHECKING:
    from headrace.app.servers.server import ServerSettings
    from headrace.engines.choosing.config import EngineConfig
    from headrace.events import Listener
    from headrace.serving.http.key_file import KeyFile

EXAMPLES = """Examples:

headrace serve --task embed --port 9000

headrace serve --engine vllm --model ./qwen --max-num-seqs 64

headrace serve --task embed --state-dir ./batches --latency-target-ms 200

headrace serve --config models.yaml
"""


@dataclass(frozen=True, slots=True)
class ServerFlags(FlagGroup):
    """Flags of the server."""

    panel: ClassVar[str] = "Server"

    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="YAML file of several models that share the device; see docs/pool.md. Default: one model.",
        ),
    ] = None
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            help="Name of the model in requests; repeatable, the first is used in answers. Default: its folder's name.",
        ),
    ] = None
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 picks a free one.")] = 8000
    batch_timeout_ms: Annotated[
        float,
        typer.Option(min=0, help="Milliseconds that an idle engine waits for more requests before it starts a batch."),
    ] = 2.0
    max_wait: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds that a request may wait for others, by forecast; others get status 429."),
    ] = 60.0
    max_requests: Annotated[
        int, typer.Option(min=1, help="Maximum records accepted but not yet answered; more get status 429.")
    ] = 262_144
    max_cost: Annotated[
        float | None,
        typer.Option(
            min=1, help="Their maximum total cost, in tokens for texts; more get status 429. Default: no limit."
        ),
    ] = None
    max_waiting_bytes: Annotated[
        int, typer.Option(min=1, help="Maximum bytes of their request bodies together; more get status 429.")
    ] = 268_435_456
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Maximum bytes of one request body; longer ones get status 413.")
    ] = 33_554_432
    max_inputs: Annotated[
        int, typer.Option(min=1, help="Maximum texts, images or messages of one request; more get status 400.")
    ] = 2_048
    max_input_chars: Annotated[
        int, typer.Option(min=1, help="Maximum characters of one text or chat; longer ones get status 400.")
    ] = 1_000_000
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds allowed for a request that sets no time limit.")
    ] = 300.0
    keep_alive_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds that a connection may wait for its next request.")
    ] = 75
    drain_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds allowed for accepted requests to finish after SIGTERM.")
    ] = 30.0
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder for files and jobs of the Batch API. Default: no Batch API.")
    ] = None
    latency_target_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Milliseconds that requests may take while the Batch API runs. Default: no target."
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a trace of batches and requests for Perfetto or Chrome (JSON). Default: none."),
    ] = None


@dataclass(frozen=True, slots=True)
class AccessFlags(FlagGroup):
    """Who may use the server, and how: keys, host names and HTTPS."""

    panel: ClassVar[str] = ACCESS_PANEL

    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="File of API keys, one per line; see docs/serving.md. Default: no file."),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Host name by which clients call the server, *.NAME or *; repeatable. Default: localhost names on a "
            "loopback address without keys and HTTPS, else all.",
        ),
    ] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Private key file (PEM). Default: no HTTPS.")] = None
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate file (PEM). Default: no HTTPS.")] = None
    ssl_keyfile_password: Annotated[
        str | None, typer.Option(help="Password of the key file. Default: the file is not encrypted.")
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(
            "--ssl-ca-certs",
            help="File of authorities (PEM) that must have signed a client's certificate. Default: no check.",
        ),
    ] = None

    def for_uvicorn(self) -> dict[str, object]:
        """The arguments for uvicorn.

        Raises:
            ConfigError: a file is missing.
        """
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together; one is missing")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-ca-certs needs a server certificate: --ssl-keyfile, --ssl-certfile")
        return {
            "ssl_keyfile": self.ssl_keyfile,
            "ssl_certfile": self.ssl_certfile,
            # A wrong one rather than none: uvicorn would ask for it on the terminal.
            "ssl_keyfile_password": self.ssl_keyfile_password or " ",
            "ssl_ca_certs": None if self.ssl_ca_certs is None else str(self.ssl_ca_certs),
            "ssl_cert_reqs": ssl.CERT_NONE if self.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        }


@dataclass(frozen=True, slots=True)
class ReplicaFlags(FlagGroup):
    """Replicas on a cluster."""

    panel: ClassVar[str] = "Cluster"

    on: Annotated[
        str | None,
        typer.Option(
            metavar="ray[:HOST:PORT]",
            help="Ray cluster to serve on; addresses as in headrace run --on. Default: this process.",
        ),
    ] = None
    min_replicas: Annotated[
        int,
        typer.Option(min=0, help="With --on: minimum replicas; with 0, the first request waits for the model to load."),
    ] = 0
    max_replicas: Annotated[int, typer.Option(min=1, help="With --on: maximum replicas.")] = 2
    target_ongoing_requests: Annotated[
        float,
        typer.Option(min=0.001, help="With --on: add replicas above this number of running requests per replica."),
    ] = 10.0
    target_queued_cost: Annotated[
        float | None,
        typer.Option(
            "--target-queued-cost",
            min=0.001,
            help="With --on: add replicas above this number of queued tokens per replica. Default: by requests.",
        ),
    ] = None
    scaledown_after: Annotated[
        float, typer.Option(min=0, help="With --on: seconds of low load before a replica is removed.")
    ] = 300.0
    cold_retry_after: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="With --on: answer 503 with this Retry-After in seconds while no replica is loaded. Default: wait.",
        ),
    ] = None
    gpus_per_replica: Annotated[
        float | None, typer.Option(min=0, help="With --on: GPUs per replica. Default: 1 if the cluster has GPUs.")
    ] = None
    cpus_per_replica: Annotated[float, typer.Option(min=0, help="With --on: CPUs per replica.")] = 1.0


@with_groups
def serve(
    context: typer.Context,
    engine: EngineFlags,
    server: ServerFlags,
    access: AccessFlags,
    cluster: ReplicaFlags,
    messages: LogFlags,
) -> None:
    """Serve a model over HTTP: OpenAI's routes, and /generate, /classify, /score, /rerank, /health, /metrics, /docs.

    Flags that are not listed here go to the engine, under the engine's own names. With --engine vllm, they are vLLM's.

    API keys come from --api-key-file and from the environment variable HEADRACE_API_KEYS, separated by commas.

    Exit status: 0 after SIGTERM or Ctrl-C, 1 if the model died, 2 if it could not be started.
    """

    messages.apply()

    def command() -> int:
        config = engine.config(context.args, "--model {}?")
        try:
            if server.config_file is not None:
                return _serve_pool(server.config_file, config, server, access, cluster)
            config = config.resolved()
            if cluster.on is not None:
                return _serve_on(cluster, config, server, access)
            return _serve(config, server, access)
        except ModuleNotFoundError as error:
            why = f"the server needs {error.name}, which is not installed"
            raise MissingExtraError(f'{why}: pip install "headrace[serve]"') from error

    sys.exit(guarded(command, context))


def _settings(config: EngineConfig, server: ServerFlags, access: AccessFlags) -> ServerSettings:
    from headrace.app.servers.server import ServerSettings, check_settings
    from headrace.serving.auth import KEYS, read_keys
    from headrace.serving.limits import ServeLimits

    limits = ServeLimits(
        max_wait_s=server.max_wait,
        max_requests=server.max_requests,
        max_cost=server.max_cost,
        max_waiting_bytes=server.max_waiting_bytes,
        max_body_bytes=server.max_body_bytes,
        max_prompts=server.max_inputs,
        max_prompt_chars=server.max_input_chars,
        timeout_s=server.timeout,
        drain_s=server.drain_timeout,
        keep_alive_s=server.keep_alive_timeout,
    )
    keys = read_keys(access.api_key_file, os.environ.get(KEYS))
    target = server.latency_target_ms
    settings = ServerSettings(
        config,
        name=server.names or None,
        batch_timeout_s=server.batch_timeout_ms / 1000,
        limits=limits,
        state=server.state_dir,
        latency_target_s=None if target is None else target / 1000,
        keys=keys,
        allowed_hosts=_allowed_hosts(server, access, has_keys=bool(keys)),
    )
    return check_settings(settings)


def _allowed_hosts(server: ServerFlags, access: AccessFlags, *, has_keys: bool) -> Sequence[str] | None:
    """The host names of requests: local ones if nothing else keeps web pages out. Warns of an open server.

    A web page has no key, and no certificate for its name.
    """
    from headrace.serving.auth import KEYS
    from headrace.serving.hosts import LOCAL
    from headrace.serving.http.listening import only_here

    inside = only_here(server.host)
    if not (has_keys or inside or access.ssl_ca_certs):
        say(
            f"WARNING: --host {server.host} without API keys: everyone who reaches this machine may use the server, "
            f"and so may web pages that they open; give --api-key-file FILE or {KEYS}, or leave out --host",
            "warning",
        )
    if not access.allowed_hosts and (has_keys or not inside or access.ssl_certfile is not None):
        return None
    return (*LOCAL, *filter(None, (server.host,)), *(access.allowed_hosts or ()))


def _serve(config: EngineConfig, server: ServerFlags, access: AccessFlags) -> int:
    """Serve in this process until stopped; returns the exit status."""
    from headrace.serving.http.listening import bind

    config.check()  # before the server's libraries are imported
    with bind(server.host, server.port):
        pass  # the server will be able to listen there
    config = resolve(config)
    say(f"loading {config.label or config.engine or 'the default model'} to serve {config.task} ...")
    settings = _settings(config, server, access)
    from headrace.app.servers.server import build
    from headrace.serving.http.server import DrainingServer

    encrypted = access.for_uvicorn()
    with _tracing(server.trace, config.label or config.task or "") as listeners:
        app, state = build(replace(settings, listeners=listeners))
        listening = {"host": server.host, "port": server.port, **encrypted}
        return DrainingServer(app, state, listening, _key_file(access)).run_app(_say_ready)


def _key_file(access: AccessFlags) -> KeyFile | None:
    from headrace.serving.auth import KEYS
    from headrace.serving.http.key_file import KeyFile

    return KeyFile(access.api_key_file, os.environ.get(KEYS), say) if access.api_key_file is not None else None


def _say_ready(address: str, routes: Sequence[str]) -> None:
    say(f"ready at {address}: {', '.join(routes)}")


@contextlib.contextmanager
def _tracing(path: Path | None, name: str) -> Iterator[Sequence[Listener]]:
    """The listener that writes the trace, if one is wanted.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        yield ()
        return
    from headrace.observe.exporters.trace import TraceWriter

    with TraceWriter(path, time.monotonic(), name) as trace:
        yield (trace,)


def _serve_pool(
    path: Path, config: EngineConfig, server: ServerFlags, access: AccessFlags, cluster: ReplicaFlags
) -> int:
    """Serve several models until stopped; returns the exit status."""
    refused = {
        "flags of an engine": config != type(config)(),
        "--served-model-name": bool(server.names),
        "--latency-target-ms": server.latency_target_ms is not None,
        "--on": cluster != ReplicaFlags(),
    }
    if given := [flag for flag, is_given in refused.items() if is_given]:
        raise ConfigError(f"--config names the models and their settings: leave out {' and '.join(given)}")
    from headrace.app.servers.pooled import build_pooled, read_models
    from headrace.serving.http.server import DrainingServer

    speak("keys")
    content = read_models(path)
    encrypted = access.for_uvicorn()
    with _tracing(server.trace, f"{len(content.models)} models") as listeners:
        app, state = build_pooled(content, replace(_settings(config, server, access), listeners=listeners))
        say(f"serving {', '.join(entry.name for entry in content.models)}; each is loaded when it is asked for")
        listening = {"host": server.host, "port": server.port, **encrypted}
        return DrainingServer(app, state, listening, _key_file(access)).run_app(_say_ready)


def _serve_on(cluster: ReplicaFlags, config: EngineConfig, server: ServerFlags, access: AccessFlags) -> int:
    """Serve on a cluster until stopped; returns the exit status."""
    from headrace.cluster.base import ClusterResources, Replicas

    kind, address = cluster_at(cluster.on or "")
    if access.ssl_certfile is not None:
        raise ConfigError("the cluster's proxy receives the requests: leave out --ssl-certfile, or --on")
    if server.trace is not None:
        raise ConfigError("the replicas of --on run elsewhere: leave out --trace, or --on")
    if access.api_key_file is not None:
        say("with --on, API keys are read once: to change them, run the command again")
    settings = _settings(resolve(config), server, access)  # so that all replicas load the same commit
    replicas = Replicas(
        cluster.min_replicas,
        cluster.max_replicas,
        cluster.target_ongoing_requests,
        cluster.scaledown_after,
        target_queued_cost=cluster.target_queued_cost,
        cold_retry_after_s=cluster.cold_retry_after,
    )
    resources = ClusterResources(address, gpus=cluster.gpus_per_replica, cpus=cluster.cpus_per_replica)
    kind.serve(settings, replicas, resources, (server.host, server.port), say)
    return 0
