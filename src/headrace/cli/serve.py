"""`headrace serve`: one model for many callers, over HTTP."""

from __future__ import annotations

import os
import ssl
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from headrace.errors import ConfigError, HeadraceError

Task = Annotated[str, typer.Option(help="What the model does: embed, generate, classify.")]
Model = Annotated[str | None, typer.Option(help="A local model folder. Default: the task's own model.")]
Name = Annotated[
    str | None, typer.Option("--served-model-name", help="The model's name in requests. Default: the folder's.")
]
Engine = Annotated[str | None, typer.Option(help="module:factory of an engine of your own, or vllm.")]
Address = Annotated[str, typer.Option("--host", help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65_535, help="The port to listen on; 0 for any free one.")]
BatchTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a batch, padding included. Default: the engine's.")
]
BatchTimeout = Annotated[float, typer.Option(min=0, help="Longest wait for company while the engine is free.")]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Most tokens of a text. Default: the model's own limit.")]
MaxRequests = Annotated[int, typer.Option(min=1, help="Records accepted and not yet answered.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds for a request that names none.")]
Drain = Annotated[float, typer.Option(min=0.001, help="Seconds for what is in flight after SIGTERM.")]
KeyFile = Annotated[Path | None, typer.Option("--api-key-file", help="API keys, one a line; see docs/serving.md.")]
StateDir = Annotated[Path | None, typer.Option(help="Folder of the Batch API's files and jobs. Default: no Batch API.")]
LatencyTarget = Annotated[
    float | None, typer.Option(min=0.001, help="What a request may take beside batches. Default: no promise.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder brings.")
]
PickledWeights = Annotated[
    bool,
    typer.Option("--allow-pickled-weights", help="Load weights that are no safetensors: they can run code as well."),
]
TlsFile = Annotated[Path | None, typer.Option(help="As uvicorn's.")]
TlsPassword = Annotated[str | None, typer.Option(help="Of the key file, where it is encrypted.")]
ClientCa = Annotated[
    Path | None, typer.Option("--ssl-ca-certs", help="Let in only clients with a certificate signed by one of these.")
]


def serve(  # noqa: PLR0913 - one parameter per flag
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
) -> None:
    """Serve a model over HTTP: OpenAI's routes, and /generate, /health, /ready, /metrics, /docs.

    API keys come from --api-key-file and from the environment's HEADRACE_API_KEYS (keys between commas).

    Exit status: 0 after SIGTERM or Ctrl-C, 1 if the model died, 2 if it could not be started.
    """
    try:
        from headrace.hosting import ServerSettings, build
        from headrace.serving.auth import read_keys
        from headrace.serving.limits import ServeLimits
        from headrace.serving.server import Server
    except ModuleNotFoundError as error:
        _stop(f'the server needs {error.name}, which is not installed: pip install "headrace[serve]"')
    tls: dict[str, Any] = {
        "ssl_keyfile": ssl_keyfile,
        "ssl_certfile": ssl_certfile,
        # Rather a wrong one than none, for which it would be asked on the terminal.
        "ssl_keyfile_password": ssl_keyfile_password or " ",
        "ssl_ca_certs": None if ssl_ca_certs is None else str(ssl_ca_certs),
        "ssl_cert_reqs": ssl.CERT_NONE if ssl_ca_certs is None else ssl.CERT_REQUIRED,
    }
    try:
        settings = ServerSettings(
            task=task,
            model=model,
            name=name,
            engine=engine,
            engine_options={} if max_model_len is None else {"max_model_len": max_model_len},
            batch_tokens=batch_tokens,
            batch_timeout_s=batch_timeout_ms / 1000,
            limits=ServeLimits(max_requests=max_requests, timeout_s=timeout, drain_s=drain_timeout),
            state=state_dir,
            latency_target_s=None if latency_target_ms is None else latency_target_ms / 1000,
            trust_remote_code=trust_remote_code,
            pickled_weights=allow_pickled_weights,
            keys=read_keys(api_key_file, os.environ.get("HEADRACE_API_KEYS")),
        )
        app, state = build(settings)
        if (ssl_keyfile is None) != (ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together; one is missing")
        if ssl_ca_certs is not None and ssl_certfile is None:
            raise ConfigError("--ssl-ca-certs needs a certificate of the server's own: --ssl-keyfile, --ssl-certfile")
        status = Server(app, state, {"host": host, "port": port, **tls}).run_app()
    except HeadraceError as error:
        _stop(str(error))
    sys.exit(status)


def _stop(line: str) -> NoReturn:
    print(f"headrace: {line}", file=sys.stderr)
    sys.exit(2)
