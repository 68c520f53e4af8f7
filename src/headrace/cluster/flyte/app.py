"""A model as a Flyte app environment, which Flyte scales with concurrent requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from headrace.app.keywords import ServerOptions
from headrace.app.servers.server import build_app
from headrace.errors import ConfigError, MissingExtraError

try:
    from flyte.app import Scaling
    from flyte.app.extras import FastAPIAppEnvironment
except ModuleNotFoundError as error:
    raise MissingExtraError(
        'an app for Flyte needs flyte, which is not installed: pip install "headrace[flyte]"'
    ) from error


def app_environment(  # noqa: PLR0913 - keyword-only settings, each one a line in the caller's code
    name: str,
    task: str | None = None,
    model: str | Path | None = None,
    *,
    replicas: int | tuple[int, int] = (0, 2),
    concurrency: int = 10,
    scaledown_after_s: int = 300,
    environment: Mapping[str, object] | None = None,
    **options: Unpack[ServerOptions],
) -> FastAPIAppEnvironment:
    """A FastAPI app on Flyte. Each replica loads one model, and all its requests share one batcher.

    Args:
        name: name of the environment: lower-case letters, digits and dashes.
        task: the model's task. See `headrace.app.servers.server.build_app` for `task`, `model` and `options`.
        replicas: number of replicas, or minimum and maximum. With a minimum of 0, the first request waits for a load.
        concurrency: concurrent requests per replica; scale up above this number.
        scaledown_after_s: seconds until an unneeded replica is removed.
        environment: additional parameters of `FastAPIAppEnvironment`, such as `image`, `resources` or `requires_auth`.

    Raises:
        ConfigError: a parameter is invalid.
        MissingExtraError: flyte is not installed.
    """
    try:
        scaling = Scaling(
            replicas=replicas, metric=Scaling.Concurrency(val=concurrency), scaledown_after=scaledown_after_s
        )
        return FastAPIAppEnvironment(
            name=name, app=build_app(task, model, **options), scaling=scaling, **(environment or {})
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"Flyte refuses app environment {name!r}: {error}") from error
