"""Flyte: a model as an app environment, which Flyte scales with the requests under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from headrace.app.server import ServerOptions, build_app
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
    environment: dict[str, Any] | None = None,
    **options: Unpack[ServerOptions],
) -> FastAPIAppEnvironment:
    """A FastAPI app on Flyte that holds one model in each replica and lets all its requests share one batcher.

    Args:
        name: of the environment, as Flyte has it: lower case, digits and dashes.
        task: what the model does; with `model` and `options`, see `headrace.app.server.build_app`.
        replicas: how many, or from how few to how many: from 0, the first request waits for a model to be loaded.
        concurrency: requests under way in a replica from which on there is to be another one.
        scaledown_after_s: how long a replica that is not needed stays.
        environment: further parameters of `FastAPIAppEnvironment`, such as `image`, `resources` or `requires_auth`.

    Raises:
        ConfigError: a parameter that cannot be.
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
