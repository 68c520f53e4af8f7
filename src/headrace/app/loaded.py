"""`headrace.load`: a model in memory, used many times from Python."""

from __future__ import annotations

import asyncio
import atexit
import functools
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, Unpack, overload

from headrace.app.jobs.budgets import follow
from headrace.app.jobs.job import SharedBatcher, already_finished, carry_out, check
from headrace.app.jobs.running import PreparedInputs, RunningModel
from headrace.app.jobs.tables import AnyTable, ListedRow, TableKind
from headrace.app.keywords import JobKeywords, LoadKeywords, ServeKeywords
from headrace.app.row_stream import RowStream, finished_rows
from headrace.app.run import check_sink, off_loop, settings_of, to_sink
from headrace.app.running_job import RunningJob, refuse_cancelled
from headrace.app.servers.warm_up import warm_up
from headrace.argument_types import build
from headrace.concurrency.loop_thread import LoopThread
from headrace.engines.choosing.config import EngineConfig, config_from
from headrace.engines.choosing.resolving import resolve
from headrace.engines.choosing.served import served_model
from headrace.errors import EngineDeadError, MissingExtraError, UnknownOptionError
from headrace.events import JobDone
from headrace.io.sinks.callback_sink import Receiver, Rows
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import SETTING_NAMES, JobSettings, refuse_flag
from headrace.observe.reporting.report import Report
from headrace.options import split
from headrace.tracebacks import naming, public

if TYPE_CHECKING:
    from fastapi import FastAPI

    from headrace.serving.state import ServerState

T = TypeVar("T")
AnyValue: TypeAlias = Any
"""What the model's task takes or gives."""

_open_models: weakref.WeakSet[LoadedModel] = weakref.WeakSet()


@public
@naming
def load(task: str | None = None, model: str | Path | None = None, **settings: Unpack[LoadKeywords]) -> LoadedModel:
    """Load a model to use it many times: `model = headrace.load("embed")`, then `model(texts)`, `model.run(...)`.

    Unless they are set, its dtype and the size of its batches are measured once for each model and machine.

    Args:
        task: such as "embed" or "generate"; None for "embed", or for "custom" with an engine of your own.
        model: a folder, an included model, or `org/name[@revision]` on the Hub (docs/engines.md); None for the default.
        settings: of the engine, each as docs/options.md has it, such as `batch_size`; an engine's own options, such as
            `max_model_len`; or `engine`, a function or PyTorch module of your own, or an engine with its options such
            as `headrace.Embedding(...)`.

    Raises:
        ConfigError: a task, engine, model or option that does not exist.
        EngineError: the model cannot be loaded.
    """
    config = config_from({"task": task, "model": model, **settings}).resolved()
    config.check()
    return LoadedModel(resolve(config.anchored()))


class LoadedModel:
    """A model in memory. All calls, from any thread and event loop, share its batches. Made by `headrace.load`.

        with headrace.load("embed") as model:
            vectors = model(["one text", "another"])
            model.run("first.parquet", sink="first.out.parquet")
            for row in model.stream("second.jsonl"):
                print(row["id"], row["embedding"])

    Args:
        config: of the engine, checked.
    """

    def __init__(self, config: EngineConfig) -> None:
        ready = warm_up(config, None)
        self._config = config
        limits = EngineConfig(
            config.task, batch_tokens=config.batch_tokens or ready.tokens, batch_size=config.batch_size,
            engine_process=config.engine_process, engine_timeout_s=config.engine_timeout_s,
        )  # fmt: skip
        self._model = RunningModel(limits, ready.engine)
        self._follower = None
        if ready.budget is None:
            self._follower = follow(config, ready.engine, self._model.batcher, self._model.tell)
        if self._follower is not None:
            self._model.add(self._follower)
        self._thread = LoopThread("headrace-model")
        self._thread.run(self._model.batcher.start())
        self._lock = threading.Lock()
        self._closed = False
        _open_models.add(self)

    @property
    def task(self) -> str:
        """The model's task."""
        return self._config.task or ""

    def describe(self) -> dict[str, object]:
        """What determines its outputs: the digest of its files, its dtype, its options."""
        return dict(self._model.engine.describe())

    # -- calls -----------------------------------------------------------------------------------------------------

    @overload
    def __call__(self, inputs: list[AnyValue], /, *, return_exceptions: bool = False) -> list[AnyValue]: ...

    @overload
    def __call__(self, inputs: object, /, *, return_exceptions: bool = False) -> AnyValue: ...

    @public
    def __call__(self, inputs: object, /, *, return_exceptions: bool = False) -> AnyValue:
        """The output of one input, or those of a list or array of them, in order. Blocks.

        Args:
            inputs: a text, a pair of texts as a tuple, a chat or whatever the task takes; or a list or array of these.
            return_exceptions: give the error of an input in the place of its output; otherwise the first is raised.

        Raises:
            ConfigError: an event loop runs here: await `submit`.
            RecordError: the model cannot take an input.
            EngineDeadError: the model failed or is closed.
        """
        many = isinstance(inputs, list) or getattr(inputs, "ndim", 0) > 1
        values: list[object] = list(inputs) if many else [inputs]  # type: ignore[call-overload]  # it is iterable
        outputs = off_loop(lambda: self._on_loop(self._model.outputs(self._prepared(values))))
        if not return_exceptions:
            _raise_first(outputs)
        return outputs if many else outputs[0]

    async def submit(self, value: object, /) -> AnyValue:
        """The output of one input, from any event loop. Many calls at the same time share batches.

        A call that is cancelled leaves the batch if that has not begun.

        Raises:
            RecordError: the model cannot take the input.
            EngineDeadError: the model failed or is closed.
        """
        self._check_open()
        prepared = await asyncio.to_thread(self._prepared, [value])
        outputs = await asyncio.wrap_future(self._thread.submit(self._model.outputs(prepared)))
        _raise_first(outputs)
        return outputs[0]

    # -- jobs ------------------------------------------------------------------------------------------------------

    @overload
    def run(  # type: ignore[overload-overlap]  # of all texts, this one has a result of its own
        self, source: object, *, sink: Literal["list"], progress: bool = False, **settings: Unpack[JobKeywords]
    ) -> list[ListedRow]: ...

    @overload
    def run(
        self, source: object, *, sink: TableKind, progress: bool = False, **settings: Unpack[JobKeywords]
    ) -> AnyTable: ...

    @overload
    def run(
        self, source: object, *, sink: str | Path | Receiver, progress: bool = False, **settings: Unpack[JobKeywords]
    ) -> Report: ...

    @public
    @naming
    def run(
        self, source: object, *, sink: str | Path | Receiver, progress: bool = False, **settings: Unpack[JobKeywords]
    ) -> object:
        """`headrace.run` with this model, which stays loaded. Other calls, and other jobs, may run at the same time.

        Args:
            source: a file, folder, glob, address, or rows (docs/formats.md).
            sink: a file or folder, a database, "list", "pandas", "polars", "arrow", or a function.
            progress: show a progress bar on stderr.
            settings: of the job, each as docs/options.md has it.

        Raises:
            ConfigError: a parameter, file or column cannot be used; nothing was written.
            JobError: the job cannot start or continue; finished records are kept.
        """
        made = self._settings(source, sink, settings)
        return off_loop(lambda: self._run(made, StopRequest(), progress=progress))

    @overload
    def arun(  # type: ignore[overload-overlap]  # as above
        self, source: object, *, sink: Literal["list"], progress: bool = False, **settings: Unpack[JobKeywords]
    ) -> RunningJob[list[ListedRow]]: ...

    @overload
    def arun(
        self, source: object, *, sink: TableKind, progress: bool = False, **settings: Unpack[JobKeywords]
    ) -> RunningJob[AnyTable]: ...

    @overload
    def arun(
        self, source: object, *, sink: str | Path | Receiver, progress: bool = False, **settings: Unpack[JobKeywords]
    ) -> RunningJob[Report]: ...

    @public
    @naming
    def arun(
        self, source: object, *, sink: str | Path | Receiver, progress: bool = False, **settings: Unpack[JobKeywords]
    ) -> RunningJob[AnyTable]:
        """`run` in the background: await the job that it returns, ask for its `progress`, or `cancel()` it.

        Args:
            source: as `run`.
            sink: as `run`.
            progress: also show a progress bar on stderr.
            settings: as `run`.

        Raises:
            ConfigError: a setting is unknown or given twice. What else `run` raises, the job raises when awaited.
        """
        made = self._settings(source, sink, settings)
        return RunningJob(lambda stop, change: self._run(change(made), stop, progress=progress))

    def stream(  # noqa: PLR0913 - keyword-only, and each caller leaves most of them out
        self,
        source: object,
        *,
        ordered: bool = True,
        text_column: str | None = None,
        text_pair_column: str | None = None,
        documents_column: str | None = None,
        id_column: str | None = None,
        prompt_template: str | Sequence[Mapping[str, object]] | None = None,
        keep_columns: Sequence[str] = (),
        input_format: str | None = None,
    ) -> RowStream:
        """The rows of a source with their outputs, as they come: `for row in model.stream(...)`, or `async for`.

        A row is a dict with the id, the columns that are kept and the output; a record that failed has `error` with
        `reason` and `message` in the place of the output. A limited number of rows is read ahead.

        Args:
            source: as `run`.
            ordered: give rows in the order of the input; False for the order in which they are finished.
            text_column: the column of the inputs, as in `run`.
            text_pair_column: the column of the second text of a pair.
            documents_column: the column of the documents to rank.
            id_column: the column of the ids; "" for positions.
            prompt_template: builds the text or the chat from columns, as in `run`.
            keep_columns: columns to copy to each row.
            input_format: the format of a file whose name does not say it.
        """
        given = {
            "text_column": text_column, "text_pair_column": text_pair_column,
            "documents_column": documents_column, "id_column": id_column,
            "prompt_template": prompt_template, "keep_columns": keep_columns, "input_format": input_format,
        }  # fmt: skip

        @public
        @naming
        def opened() -> AsyncGenerator[list[ListedRow], None]:
            self._check_open()
            plan = check(self._settings(source, Rows(), given), own_engine=False)
            return finished_rows(self._model, plan, ordered=ordered)

        return RowStream(self._thread, opened)

    # -- requests --------------------------------------------------------------------------------------------------

    @public
    @naming
    def app(self, **settings: Unpack[ServeKeywords]) -> FastAPI:
        """A FastAPI app that serves this model, as `headrace.build_app`; the model stays loaded when the app ends.

        Args:
            settings: of the server, each as docs/options.md has it.

        Raises:
            ConfigError: a setting is unknown, or needs a model of the server's own, as the Batch API does.
            MissingExtraError: FastAPI is not installed.
        """
        return self._server(settings)[0]

    @public
    @naming
    def serve(self, host: str = "127.0.0.1", port: int = 8000, **settings: Unpack[ServeKeywords]) -> None:
        """Serve this model over HTTP until SIGTERM or Ctrl-C; it stays loaded, and may be used from other threads.

        Args:
            host: the address to listen at.
            port: 0 for one that is free.
            settings: as `app`.

        Raises:
            ConfigError: as `app`, or the address cannot be used.
        """
        app, state = self._server(settings)
        server = import_module("headrace.serving.http.server")
        off_loop(lambda: server.DrainingServer(app, state, {"host": host, "port": port}).run_app(_say_ready))

    def _server(self, settings: Mapping[str, object]) -> tuple[FastAPI, ServerState]:
        self._check_open()
        known = ServeKeywords.__annotations__
        if name := next((one for one in settings if one not in known), None):
            raise UnknownOptionError(name, self.task, None, (), (), tuple(known))
        try:
            servers = import_module("headrace.app.servers.server")
        except ModuleNotFoundError as error:
            raise MissingExtraError(f'serve: {error}: pip install "headrace[serve]"') from error
        given = {name: value for name, value in settings.items() if name != "limits" or value is not None}
        made = build(servers.ServerSettings, {**given, "config": self._config})
        built: tuple[FastAPI, ServerState] = servers.build(made, self._model)
        return built

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what was submitted, then free the model. Safe to call twice."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        _open_models.discard(self)
        self._thread.run(self._model.batcher.stop())
        self._thread.close()
        if self._follower is not None:
            self._follower(JobDone("finished", time.monotonic()))  # it keeps what it learned for the next load
        self._model.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _prepared(self, values: list[object]) -> PreparedInputs:
        if self._config.adapters:
            served = served_model(None, self._config)
            values = [served.refusal(value) or value for value in values]
        return self._model.prepare(values)

    def _settings(self, source: object, sink: object, given: Mapping[str, object]) -> JobSettings:
        own, unknown = split(JobSettings, given)
        if name := next(iter(unknown), None):
            refuse_flag(name)
            raise UnknownOptionError(name, self.task, None, (), (), SETTING_NAMES)
        return settings_of({"source": source, "sink": sink, **own}, self._config)

    def _run(self, settings: JobSettings, stop: StopRequest, *, progress: bool) -> AnyTable:
        self._check_open()
        return to_sink(settings, functools.partial(self._report, stop=stop, progress=progress))

    def _report(self, settings: JobSettings, stop: StopRequest, *, progress: bool) -> Report:
        check_sink(settings, progress)
        began = time.monotonic()
        with check(settings, own_engine=False) as plan:
            if (ended := already_finished(plan)) is None:
                shared = SharedBatcher(self._model.batcher, self._on_loop, self._model.heard)
                engine = self._model.engine
                ended = carry_out(plan, engine, stop, progress=progress, began=began, shared=shared)
        end, report = ended
        refuse_cancelled(end.state, end.records)
        return report.spoken()

    def _on_loop(self, coroutine: Coroutine[object, None, T]) -> T:
        """Run a coroutine on the model's loop, and wait for it; what interrupts the wait cancels it and waits on."""
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        if self._closed:
            coroutine.close()
            self._check_open()
        future = self._thread.submit(watched())
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the model is closed; load it again with headrace.load")


def _say_ready(address: str, _: Sequence[str]) -> None:
    sys.stderr.write(f"headrace: ready at {address}\n")


def _raise_first(outputs: Sequence[object]) -> None:
    for output in outputs:
        if isinstance(output, Exception):
            raise output


@atexit.register
def _close_all() -> None:
    for model in list(_open_models):
        model.close()
