"""A stage for Ray Data: `dataset.map_batches(Stage, ...)`."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Unpack

import numpy as np

import headrace
from headrace.cluster.worker import WorkerActor, WorkerInfo, WorkerSpec, loaded, unpack
from headrace.engines.choosing.config import EngineConfig, merged_options, model_name
from headrace.engines.keywords import EngineKeywords
from headrace.errors import ConfigError, EngineDeadError
from headrace.processes.portable import Portable
from headrace.records import JsonObject


class Stage:
    """One model and one batcher per Ray Data actor. Concurrent blocks share batches.

        dataset.map_batches(
            Stage,
            fn_constructor_kwargs={"task": "embed", "column": "text"},
            batch_size=1024,
            compute=ray.data.ActorPoolStrategy(size=4),
            num_gpus=1,
        )

    Each row gets two new columns: `output`, and `error`, which is None unless the row failed.

    Args:
        task: the model's task. Other parameters are those of `headrace.run`.
        column: the input column.

    Raises:
        ConfigError: an unknown task, engine, model or option.
    """

    def __init__(  # noqa: PLR0913 - keyword-only settings, each one a line in the caller's code
        self,
        task: str | None = None,
        model: str | Path | None = None,
        *,
        column: str = "text",
        engine: str | None = None,
        engine_options: Mapping[str, object] | None = None,
        engine_timeout_s: float | None = None,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        config = EngineConfig(
            task=task,
            model=model_name(model),
            engine=engine,
            engine_options=merged_options(engine_options, options),
            batch_tokens=batch_tokens,
            batch_size=batch_size,
            engine_timeout_s=engine_timeout_s,
        ).resolved()
        config.check(("column",))
        self._column = column
        self._worker = WorkerActor(WorkerSpec(config, headrace.__version__))
        self._loading: asyncio.Task[WorkerInfo | Portable] | None = None

    async def __call__(self, batch: Mapping[str, Iterable[object]]) -> AsyncIterator[JsonObject]:
        """The rows with their outputs.

        Raises:
            HeadraceError: the model cannot be loaded or has died, or the column does not exist.
        """
        if self._loading is None:
            self._loading = asyncio.create_task(self._worker.load(), name="headrace-load")
        loaded(await asyncio.shield(self._loading))
        if self._column not in batch:
            raise ConfigError(f"there is no column {self._column!r}; the rows have {', '.join(batch)}")
        values = [value.item() if isinstance(value, np.generic) else value for value in batch[self._column]]
        reply = unpack(await self._worker.work([pickle.dumps(value) for value in values]))
        for result in reply.results:
            if isinstance(result, EngineDeadError):
                raise result
        failed = [isinstance(result, Exception) for result in reply.results]
        yield {
            **batch,
            "output": [None if bad else result for bad, result in zip(failed, reply.results, strict=True)],
            "error": [
                f"{type(result).__name__}: {result}" if bad else None
                for bad, result in zip(failed, reply.results, strict=True)
            ],
        }
