"""`headrace serve`: one model for many callers, over HTTP."""

from __future__ import annotations

import functools
import os
import ssl
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from headrace.cli.engine_flags import as_flag, as_typed, engine_options, suggestion
from headrace.errors import ConfigError, HeadraceError, UnknownOptionError

if TYPE_CHECKING:
    from headrace.app.server import ServerSettings

Task = Annotated[
    str,
    typer.Option(help="What the model does: embed, classify, zero-shot, generate, or a task of headrace run."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="A local model folder, or the name of a small included model. Default: the task's included model, if it "
        "has one."
    ),
]
Name = Annotated[
    str | None, typer.Option("--served-model-name", help="The model's name in requests. Default: the folder's name.")
]
Engine = Annotated[str | None, typer.Option(help="onnx, vllm, or module:name of your own. Default: the task's.")]
Address = Annotated[str, typer.Option("--host", help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65_535, help="The port to listen on; 0 for any free one.")]
BatchTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum tokens in a batch, padding included. Default: the engine's.")
]
BatchTimeout = Annotated[
    float, typer.Option(min=0, help="How long an idle engine waits for more requests before it starts a batch.")
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Maximum tokens in a text. Default: the model's own limit.")
]
MaxRequests = Annotated[int, typer.Option(min=1, help="Maximum records accepted and not yet answered; more get 429.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Time limit in seconds of a request that names none.")]
Drain = Annotated[float, typer.Option(min=0.001, help="Seconds that accepted requests have to finish after SIGTERM.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="A file of API keys, one on each line; see docs/serving.md.")
]
StateDir = Annotated[
    Path | None, typer.Option(help="Turns on the Batch API, and keeps its files and jobs in this folder.")
]
LatencyTarget = Annotated[
    float | None,
    typer.Option(
        min=0.001, help="Keep requests below this latency while batches of the Batch API run. Default: no target."
    ),
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code from the model's folder.")]
PickledWeights = Annotated[
    bool,
    typer.Option(
        "--allow-pickled-weights", help="Load weights in formats other than safetensors. Such files can run code."
    ),
]
TlsFile = Annotated[Path | None, typer.Option(help="For HTTPS, as in uvicorn.")]
TlsPassword = Annotated[str | None, typer.Option(help="The password of the key file, if it is encrypted.")]
ClientCa = Annotated[
    Path | None,
    typer.Option("--ssl-ca-certs", help="Accept only clients with a certificate signed by one of these authorities."),
]

On = Annotated[
    str | None,
    typer.Option(
        metavar="ray[://HOST:PORT]",
        help="Serve on a Ray cluster, with as many replicas as the load needs; addresses as in headrace run --on.",
    ),
]
MinReplicas = Annotated[
    int, typer.Option(min=0, help="With --on: minimum replicas. With 0, the first request waits until one is loaded.")
]
MaxReplicas = Annotated[int, typer.Option(min=1, help="With --on: maximum replicas.")]
TargetOngoing = Annotated[
    float, typer.Option(min=0.001, help="With --on: add replicas if each has more running requests than this.")
]
TargetCost = Annotated[
    float | None,
    typer.Option(
        "--target-queued-cost",
        min=0.001,
        help="With --on: add replicas by the tokens that wait in each, instead of by requests.",
    ),
]
ColdRetryAfter = Annotated[
    float | None,
    typer.Option(
        min=1, help="With --on: while no replica is loaded, answer 503 with this Retry-After in seconds. Default: wait."
    ),
]
ScaledownAfter = Annotated[
    float, typer.Option(min=0, help="With --on: seconds of low load before a replica is removed.")
]
GpusPerReplica = Annotated[
    float | None, typer.Option(min=0, help="With --on: GPUs of each replica. Default: 1 if the cluster has GPUs.")
]
CpusPerReplica = Annotated[float, typer.Option(min=0, help="With --on: CPUs of each replica.")]


def serve(  # noqa: PLR0913 - one parameter per flag
    context: typer.Context,
    task: Task = "embed",
    model: Model = None,
    name: Name = None,
    engine: Engine = None,
    host: Address = "127.0.0.1",
    port: Port = 8000,
    batch_tokens: BatchTokens = None,
    batch_timeout_ms: BatchTimeout = 2.0,
    max_model_len: MaxModelLen = None,
    max_requests: MaxRequests = 4_096,
    timeout: Timeout = 300.0,
    drain_timeout: Drain = 30.0,
    api_key_file: KeyFile = None,
    state_dir: StateDir = None,
    latency_target_ms: LatencyTarget = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickled_weights: PickledWeights = False,
    ssl_keyfile: TlsFile = None,
    ssl_certfile: TlsFile = None,
    ssl_keyfile_password: TlsPassword = None,
    ssl_ca_certs: ClientCa = None,
    on: On = None,
    min_replicas: MinReplicas = 0,
    max_replicas: MaxReplicas = 2,
    target_ongoing_requests: TargetOngoing = 10.0,
    target_queued_cost: TargetCost = None,
    scaledown_after: ScaledownAfter = 300.0,
    cold_retry_after: ColdRetryAfter = None,
    gpus_per_replica: GpusPerReplica = None,
    cpus_per_replica: CpusPerReplica = 1.0,
) -> None:
    """Serve a model over HTTP: OpenAI's routes, and /generate, /health, /ready, /metrics, /docs.

    Flags that are not listed here go to the engine, under the engine's own names, such as --labels for zero-shot.

    API keys come from --api-key-file and from the environment variable HEADRACE_API_KEYS, separated by commas.

    Exit status: 0 after SIGTERM or Ctrl-C, 1 if the model died, 2 if it could not be started.
    """
    given = SimpleNamespace(**locals())
    try:
        given.options = engine_options(context.args, "--model {}?")
        if max_model_len is not None:
            given.options["max_model_len"] = max_model_len
        sys.exit(_serve(given) if on is None else _serve_on(on, given))
    except ModuleNotFoundError as error:
        _stop(f'the server needs {error.name}, which is not installed: pip install "headrace[serve]"')
    except UnknownOptionError as error:
        flags = [flag for parameter in context.command.params for flag in parameter.opts]
        typed = as_typed(context.args, error.option)
        _stop(f"{typed}: {error}{suggestion(typed, [*flags, *map(as_flag, error.known)])}")
    except HeadraceError as error:
        _stop(str(error))


def _settings(given: SimpleNamespace) -> ServerSettings:
    """What the flags say, by their parameters' names."""
    from headrace.app.server import ServerSettings
    from headrace.serving.auth import read_keys
    from headrace.serving.limits import ServeLimits

    limits = ServeLimits(max_requests=given.max_requests, timeout_s=given.timeout, drain_s=given.drain_timeout)
    return ServerSettings(
        task=given.task,
        model=given.model,
        name=given.name,
        engine=given.engine,
        engine_options=given.options,
        batch_tokens=given.batch_tokens,
        batch_timeout_s=given.batch_timeout_ms / 1000,
        limits=limits,
        state=given.state_dir,
        latency_target_s=None if given.latency_target_ms is None else given.latency_target_ms / 1000,
        trust_remote_code=given.trust_remote_code,
        pickled_weights=given.allow_pickled_weights,
        keys=read_keys(given.api_key_file, os.environ.get("HEADRACE_API_KEYS")),
    )


def _serve(given: SimpleNamespace) -> int:
    """Serve in this process until told to stop; returns the exit status."""
    from headrace.engines import registry

    registry.check(given.task, given.model, given.engine, given.options)
    say(f"loading {given.model or given.engine or 'the default model'} to serve {given.task} ...")
    from headrace.app.server import build
    from headrace.serving.http.server import Server

    tls: dict[str, Any] = {
        "ssl_keyfile": given.ssl_keyfile,
        "ssl_certfile": given.ssl_certfile,
        # Rather a wrong one than none, for which it would be asked on the terminal.
        "ssl_keyfile_password": given.ssl_keyfile_password or " ",
        "ssl_ca_certs": None if given.ssl_ca_certs is None else str(given.ssl_ca_certs),
        "ssl_cert_reqs": ssl.CERT_NONE if given.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    }
    app, state = build(_settings(given))
    if (given.ssl_keyfile is None) != (given.ssl_certfile is None):
        raise ConfigError("--ssl-keyfile and --ssl-certfile go together; one is missing")
    if given.ssl_ca_certs is not None and given.ssl_certfile is None:
        raise ConfigError("--ssl-ca-certs needs a certificate of the server's own: --ssl-keyfile, --ssl-certfile")
    return Server(app, state, {"host": given.host, "port": given.port, **tls}).run_app(
        lambda address, routes: say(f"ready at {address}: {', '.join(routes)}")
    )


def _serve_on(on: str, given: SimpleNamespace) -> int:
    """Serve on a cluster until told to stop; returns the exit status."""
    kind, _, place = on.partition(":")
    if kind != "ray":
        raise ConfigError(f"--on is {on!r}; it must be ray, ray:HOST:PORT or ray://HOST:PORT")
    if given.ssl_certfile is not None:
        raise ConfigError("Ray Serve's own proxy takes the requests: leave out --ssl-certfile, or --on")
    from headrace.cluster.ray_serve import Replicas, serve_until_stopped
    from headrace.cluster.ray_workers import ClusterResources

    replicas = Replicas(
        given.min_replicas,
        given.max_replicas,
        given.target_ongoing_requests,
        given.scaledown_after,
        target_queued_cost=given.target_queued_cost,
        cold_retry_after_s=given.cold_retry_after,
    )
    address = on if place.startswith("//") else place
    cluster = ClusterResources(address or None, gpus=given.gpus_per_replica, cpus=given.cpus_per_replica)
    say = functools.partial(print, "headrace:", file=sys.stderr)
    serve_until_stopped(_settings(given), replicas, cluster, (given.host, given.port), say)
    return 0


def say(line: str) -> None:
    """One line to stderr."""
    print(f"headrace: {line}", file=sys.stderr, flush=True)


def _stop(line: str) -> NoReturn:
    print(f"headrace: {line}", file=sys.stderr)
    sys.exit(2)
