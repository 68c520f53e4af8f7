"""`headrace serve`: serve a model over HTTP."""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from headrace.app.servers.settings import ServerSettings
from headrace.cli.cluster_flags import cluster_at, refuse_without_cluster
from headrace.cli.engine_flags import EngineCommand, config_of, engine_and_model
from headrace.cli.flags import ACCESS_PANEL, Given, with_settings
from headrace.cli.logs import LogFlags
from headrace.cli.outcome import say
from headrace.engines.choosing.resolving import resolve
from headrace.errors import ConfigError, MissingExtraError
from headrace.extras import require
from headrace.options import option
from headrace.wording import speak, spelled

if TYPE_CHECKING:
    from headrace.events import Listener
    from headrace.serving.http.key_file import KeyFile
    from headrace.serving.http.over_grpc import GrpcAddress

EXAMPLES = """Examples:

headrace serve --task embed --port 9000

headrace serve --engine vllm --model ./qwen --max-num-seqs 64

headrace serve --task embed --state-dir ./batches --latency-target-ms 200

headrace serve --config models.yaml
"""


class ServeCommand(EngineCommand):
    by_environment = True


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Flags of the server."""

    panel: ClassVar[str] = "Server"

    config_file: Path | None = option(
        None,
        "YAML file of several models that share the device; see docs/pool.md. Default: one model.",
        flags=("--config",),
        brief="YAML file of several models",
    )
    host: str = option("127.0.0.1", "Address to listen on.", brief="address to listen on")
    port: int = option(
        8000,
        "Port to listen on; 0 picks a free one.",
        minimum=0,
        maximum=65_535,
        brief="port to listen on; 0 picks a free one",
    )
    grpc_port: int | None = option(
        None,
        "Port of the Open Inference Protocol over gRPC; 0 picks a free one. Default: no gRPC.",
        minimum=0,
        maximum=65_535,
    )
    trace: Path | None = option(
        None, "Write a trace of batches and requests for Perfetto or Chrome (JSON). Default: none."
    )


@dataclass(frozen=True, slots=True)
class AccessFlags:
    """Who may use the server, and how: keys, host names and HTTPS."""

    panel: ClassVar[str] = ACCESS_PANEL

    api_key_file: Path | None = option(
        None,
        "File of API keys, one per line; see docs/serving.md. Default: no file.",
        brief="file of API keys, one a line",
    )
    ssl_keyfile: Path | None = option(None, "Private key file (PEM). Default: no HTTPS.")
    ssl_certfile: Path | None = option(None, "Certificate file (PEM). Default: no HTTPS.")
    ssl_keyfile_password: str | None = option(None, "Password of the key file. Default: the file is not encrypted.")
    ssl_ca_certs: Path | None = option(
        None, "File of authorities (PEM) that must have signed a client's certificate. Default: no check."
    )

    def for_uvicorn(self) -> dict[str, object]:
        """The arguments for uvicorn. Raises ConfigError: a file is missing."""
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("``ssl_keyfile`` and ``ssl_certfile`` go together; one is missing")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("``ssl_ca_certs`` needs a server certificate: ``ssl_keyfile``, ``ssl_certfile``")
        return {
            "ssl_keyfile": self.ssl_keyfile,
            "ssl_certfile": self.ssl_certfile,
            # A wrong one rather than none: uvicorn would ask for it on the terminal.
            "ssl_keyfile_password": self.ssl_keyfile_password or " ",
            "ssl_ca_certs": None if self.ssl_ca_certs is None else str(self.ssl_ca_certs),
            "ssl_cert_reqs": ssl.CERT_NONE if self.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        }


@dataclass(frozen=True, slots=True)
class ReplicaFlags:
    """Replicas on a cluster."""

    panel: ClassVar[str] = "Cluster"

    on: str | None = option(
        None,
        "Ray cluster to serve on; addresses as in headrace run --on. Default: this process.",
        metavar="ray[:HOST:PORT]",
    )
    min_replicas: int = option(
        0, "With --on: minimum replicas; with 0, the first request waits for the model to load.", minimum=0
    )
    max_replicas: int = option(2, "With --on: maximum replicas.", minimum=1)
    target_ongoing_requests: float = option(
        10.0, "With --on: add replicas above this number of running requests per replica.", minimum=0.001
    )
    target_queued_cost: float | None = option(
        None,
        "With --on: add replicas above this number of queued tokens per replica. Default: by requests.",
        minimum=0.001,
    )
    scaledown_after: float = option(300.0, "With --on: seconds of low load before a replica is removed.", minimum=0)
    cold_retry_after: float | None = option(
        None,
        "With --on: answer 503 with this Retry-After in seconds while no replica is loaded. Default: wait.",
        minimum=1,
    )
    gpus_per_replica: float | None = option(
        None, "With --on: GPUs per replica. Default: 1 if the cluster has GPUs.", minimum=0
    )
    cpus_per_replica: float = option(1.0, "With --on: CPUs per replica.", minimum=0)


@with_settings
def serve(
    context: typer.Context,
    given: Given[ServerSettings],
    server: ServerFlags,
    access: AccessFlags,
    cluster: ReplicaFlags,
    messages: LogFlags,
) -> int:
    """Serve a model over HTTP: OpenAI's routes, and /generate, /classify, /score, /rerank, /health, /metrics, /docs.

    Flags that are not listed here go to the engine, under the engine's own names. With --engine vllm, they are vLLM's.

    API keys come from --api-key-file and from the environment variable HEADRACE_API_KEYS, separated by commas.

    Exit status: 0 after SIGTERM or Ctrl-C, 1 if the model died, 2 if it could not be started.
    """
    messages.apply()
    refuse_without_cluster(cluster)
    config = config_of(given, context.args, "--model {}?")
    try:
        if server.config_file is not None:
            return _serve_pool(server.config_file, given.build(config=config), server, access, cluster)
        settings = given.build(config=config.resolved())
        if cluster.on is not None:
            return _serve_on(cluster, settings, server, access)
        return serve_one(settings, server, access)
    except ModuleNotFoundError as error:
        why = f"the server needs {error.name}, which is not installed"
        raise MissingExtraError(f'{why}: pip install "headrace[serve]"') from error


def _with_access(settings: ServerSettings, server: ServerFlags, access: AccessFlags) -> ServerSettings:
    """The settings, checked, with the keys and the names of hosts that may be called."""
    from headrace.app.servers.server import check_settings
    from headrace.serving.auth import KEYS, read_keys

    keys = read_keys(access.api_key_file, os.environ.get(KEYS))
    hosts = _allowed_hosts(settings.allowed_hosts, server, access, has_keys=bool(keys))
    return check_settings(replace(settings, keys=keys, allowed_hosts=hosts))


def _allowed_hosts(
    given: Sequence[str] | None, server: ServerFlags, access: AccessFlags, *, has_keys: bool
) -> Sequence[str] | None:
    """The host names of requests: local ones if nothing else keeps web pages out. Warns of an open server.

    A web page has no key, and no certificate for its name.
    """
    from headrace.serving.auth import KEYS
    from headrace.serving.hosts import LOCAL
    from headrace.serving.http.listening import only_here

    inside = only_here(server.host)
    if not (has_keys or inside or access.ssl_ca_certs):
        say(
            spelled(
                f"WARNING: ``host={server.host}`` without API keys: everyone who reaches this machine may use the "
                f"server, and so may web pages that they open; give ``api_key_file=FILE`` or {KEYS}, or leave out "
                "``host``"
            ),
            "warning",
        )
    if not given and (has_keys or not inside or access.ssl_certfile is not None):
        return None
    return (*LOCAL, *filter(None, (server.host,)), *(given or ()))


def serve_one(settings: ServerSettings, server: ServerFlags, access: AccessFlags) -> int:
    """Serve in this process until stopped; returns the exit status."""
    from headrace.serving.http.listening import bind

    settings.config.check()  # before the server's libraries are imported
    for name, port in (("port", server.port), ("grpc_port", server.grpc_port)):
        if port is not None:
            bind(server.host, port, name).close()  # the server will be able to listen there
    config = resolve(settings.config)
    settings = _with_access(replace(settings, config=config), server, access)
    from headrace.app.servers.server import build
    from headrace.serving.http.server import DrainingServer

    over_http, over_grpc = _listening(server, access)
    with _tracing(server.trace, config.label or config.task or "") as listeners:
        app, state = build(replace(settings, listeners=listeners))
        say(f"loading {engine_and_model(config)} to serve {config.task} ...")
        return DrainingServer(app, state, over_http, _key_file(access), over_grpc).run_app(_say_ready, say)


def _listening(server: ServerFlags, access: AccessFlags) -> tuple[dict[str, object], GrpcAddress | None]:
    """The arguments for uvicorn, and where gRPC is served.

    Raises:
        ConfigError: a file is missing, or gRPC cannot read it.
        MissingExtraError: gRPC is asked for and not installed.
    """
    over_http = {"host": server.host, "port": server.port, **access.for_uvicorn()}
    if server.grpc_port is None:
        return over_http, None
    if server.grpc_port == server.port != 0:
        raise ConfigError(f"``port`` and ``grpc_port`` are both {server.port}; choose another ``grpc_port``")
    require("tritonclient.grpc", "grpc", "``grpc_port``")
    from headrace.serving.http.over_grpc import GrpcAddress

    if access.ssl_keyfile_password is not None:
        raise ConfigError("gRPC reads no encrypted key: leave out ``ssl_keyfile_password``, or ``grpc_port``")
    files = (access.ssl_certfile, access.ssl_keyfile, access.ssl_ca_certs)
    return over_http, GrpcAddress(server.host, server.grpc_port, *files)


def _key_file(access: AccessFlags) -> KeyFile | None:
    from headrace.serving.auth import KEYS
    from headrace.serving.http.key_file import KeyFile

    return KeyFile(access.api_key_file, os.environ.get(KEYS), say) if access.api_key_file is not None else None


def _say_ready(address: str, routes: Sequence[str]) -> None:
    say(f"ready at {address}: {', '.join(routes)}")


@contextlib.contextmanager
def _tracing(path: Path | None, name: str) -> Iterator[Sequence[Listener]]:
    """The listener that writes the trace, if one is wanted. Raises ConfigError: the file cannot be written."""
    if path is None:
        yield ()
        return
    from headrace.observe.exporters.trace import TraceWriter

    with TraceWriter(path, time.monotonic(), name) as trace:
        yield (trace,)


def _serve_pool(
    path: Path, settings: ServerSettings, server: ServerFlags, access: AccessFlags, cluster: ReplicaFlags
) -> int:
    refused = {
        **{f"``{name}``": True for name in settings.config.given()},
        "``name``": settings.name is not None,
        "``latency_target_s``": settings.latency_target_s is not None,
        "``on``": cluster != ReplicaFlags(),
    }
    if given := [flag for flag, is_given in refused.items() if is_given]:
        raise ConfigError(f"``config`` names the models and their settings: leave out {' and '.join(given)}")
    from headrace.app.servers.pooled import build_pooled, read_models
    from headrace.serving.http.server import DrainingServer

    speak("keys")
    content = read_models(path)
    over_http, over_grpc = _listening(server, access)
    with _tracing(server.trace, f"{len(content.models)} models") as listeners:
        app, state = build_pooled(content, replace(_with_access(settings, server, access), listeners=listeners))
        say(f"serving {', '.join(entry.name for entry in content.models)}; each is loaded when it is asked for")
        return DrainingServer(app, state, over_http, _key_file(access), over_grpc).run_app(_say_ready, say)


def _serve_on(cluster: ReplicaFlags, settings: ServerSettings, server: ServerFlags, access: AccessFlags) -> int:
    from headrace.cluster.base import ClusterResources, Replicas

    kind, address = cluster_at(cluster.on or "")
    if access.ssl_certfile is not None:
        raise ConfigError("the cluster's proxy receives the requests: leave out ``ssl_certfile``, or ``on``")
    if server.grpc_port is not None:
        raise ConfigError("the cluster's proxy receives the requests: leave out ``grpc_port``, or ``on``")
    if server.trace is not None:
        raise ConfigError("the replicas of ``on`` run elsewhere: leave out ``trace``, or ``on``")
    if access.api_key_file is not None:
        say("on a cluster, API keys are read once: to change them, run the command again")
    config = resolve(settings.config)  # so that all replicas load the same commit
    settings = _with_access(replace(settings, config=config), server, access)
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


COMMAND = ServeCommand
