"""Run a TorchServe handler, a function or class with `handle(data, context)`, with its batch settings."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Any, TypeVar

from headrace.batching.callables import plain_function
from headrace.device.placement import choose_device
from headrace.engines.base import Prepared
from headrace.engines.profile import EngineProfile
from headrace.engines.torchserve import files as handler_files
from headrace.engines.torchserve import ts_package
from headrace.engines.torchserve.context import Context
from headrace.engines.torchserve.files import HandlerFiles
from headrace.engines.torchserve.options import TorchServe
from headrace.errors import BadResultError, ConfigError, EngineDeadError, EngineError, RecordError, attempted
from headrace.records import text_refusal


class TorchServeEngine:
    """Calls a handler as TorchServe does: rows of `{"body": ...}` in, one answer per row out.

    The handler receives text as bytes, and an object or list as parsed JSON. Maximum batch size and delay are the
    handler's own settings. An answer with a status of 400 or more (`context.set_response_status`) fails its record.

    Raises:
        ConfigError: a file is missing or invalid, or the handler has no entry point.
        EngineError: the handler cannot be imported or initialized.
    """

    def __init__(self, options: TorchServe) -> None:
        if options.handler is None:
            raise ConfigError("no handler is set (``handler``); name a handler file, a .mar archive or its folder")
        place = choose_device(options.device)
        gpu = None if place.type == "cpu" else place.index or 0
        self._files = handler_files.read(options.handler, options.model, options.config)
        self._context = Context(self._files, gpu)
        self._thread = HandlerThread(self._files.name)
        self._handle: Callable[[object, Context], object] | None = None
        try:
            self._handle = self._thread.call(
                functools.partial(_load, self._files, self._context), self._files.startup_timeout_s, "startupTimeout"
            )
        finally:
            if self._handle is None:
                self.close()
        self.profile = EngineProfile(
            batching="batches",
            cost_unit="records",
            batch_cost=self._files.batch_size,
            batch_size=self._files.batch_size,
            batch_delay_s=self._files.batch_delay_s,
        )

    def describe(self) -> Mapping[str, object]:
        total = hashlib.blake2b(digest_size=16)
        for path in sorted(self._files.model_dir.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                with path.open("rb") as file:
                    total.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
        code = hashlib.blake2b(self._files.handler.read_bytes(), digest_size=16).hexdigest()
        return {"engine": "torchserve", "handler_digest": code, "model_digest": total.hexdigest()}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[dict[str, object]] | Exception]:
        """One request row per value; a RecordError if the value is null or invalid text."""
        return [_row(value) for value in inputs]

    def forward(self, batch: list[dict[str, object]]) -> list[object]:
        """The handler's answer for each row.

        Raises:
            BadResultError: the handler's answer is not a list, or its length differs from the batch's.
            EngineDeadError: the engine is closed, or the handler exceeded its response timeout.
        """
        handle = self._handle
        if handle is None:
            raise EngineDeadError("the engine is closed; create a new one")
        if not batch:
            return []
        self._context.begin(len(batch))
        rows, context = [dict(row) for row in batch], self._context
        answers = self._thread.call(lambda: handle(rows, context), self._files.response_timeout_s, "responseTimeout")
        if not isinstance(answers, (list, tuple)):
            raise BadResultError(f"the handler returned a {type(answers).__name__}; it must return a list")
        if len(answers) != len(batch):
            raise BadResultError(f"the handler returned {len(answers)} results for batch of {len(batch)}")
        return [_plain(context.answer(index, answer)) for index, answer in enumerate(answers)]

    def close(self) -> None:
        """Drop the handler and delete unpacked files. Safe to call twice."""
        self._handle = None
        self._thread.close()
        if self._files.unpacked is not None:
            self._files.unpacked.cleanup()


def _row(value: object) -> Prepared[dict[str, object]] | Exception:
    if value is None:
        return RecordError("the value is null; a handler's request has a body")
    if isinstance(value, str):
        if refusal := text_refusal(value):
            return refusal
        value = bytearray(value.encode())
    elif isinstance(value, (bytes, memoryview)):
        value = bytearray(value)
    return Prepared({"body": value}, cost=1)


def _plain(answer: object) -> object:
    if not isinstance(answer, (bytes, bytearray)):
        return answer
    try:
        return answer.decode()
    except UnicodeDecodeError:
        return bytes(answer)


def _load(files: HandlerFiles, context: Context) -> Callable[[object, Context], object]:
    """Import and initialize the handler; returns its entry point."""
    ts_package.provide()
    module = _import(files)
    name = files.function or "handle"
    handle = attempted(_initialized, module, name, files, context)
    if isinstance(handle, ConfigError):
        raise handle
    if isinstance(handle, BaseException):
        raise EngineError(f"handler {files.name} cannot be initialized: {_cause(handle, files)}") from handle
    plain_function(f"{name} of {files.name}", handle)
    return handle


def _initialized(
    module: ModuleType, name: str, files: HandlerFiles, context: Context
) -> Callable[[object, Context], object]:
    if hasattr(module, name):
        function: Callable[[object, Context], object] = getattr(module, name)
        plain_function(f"{name} of {files.handler.name}", function)
        function(None, context)  # TorchServe's convention: a call without data loads the model
        return function
    service = _the_class(module, files)()
    service.initialize(context)
    handle: Callable[[object, Context], object] = service.handle
    return handle


def _import(files: HandlerFiles) -> ModuleType:
    found = attempted(_module_of, files)
    if isinstance(found, BaseException):
        advice = "; install its dependencies first" if isinstance(found, ImportError) else ""
        raise EngineError(f"handler {files.name} cannot be imported: {_cause(found, files)}{advice}") from found
    return found


def _module_of(files: HandlerFiles) -> ModuleType:
    if files.built_in:
        return importlib.import_module(f"headrace.engines.torchserve.{files.handler.stem}")
    if str(files.model_dir) not in sys.path:
        sys.path.insert(0, str(files.model_dir))
    return handler_files.import_file(files.handler)


def _cause(error: BaseException, files: HandlerFiles) -> str:
    """An error in one line, with the number of the last line in the handler's file that led to it."""
    lines = [step.lineno for step in traceback.extract_tb(error.__traceback__) if step.filename == str(files.handler)]
    place = f" (line {lines[-1]})" if lines else ""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {words}' if words else ''}{place}"


def _the_class(module: ModuleType, files: HandlerFiles) -> type[Any]:
    if files.built_in:
        kind: type[Any] = getattr(module, files.built_in)
        return kind
    classes = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and hasattr(kind, "handle")
    ]
    if len(classes) != 1 or files.function:
        wanted = (
            f"a function {files.function}" if files.function else "a function handle, or one class with a method handle"
        )
        raise ConfigError(
            f"handler {files.name} must have {wanted}; classes with one: "
            f"{', '.join(kind.__name__ for kind in classes) or 'none'}"
        )
    return classes[0]


T = TypeVar("T")


class HandlerThread:
    """Runs a handler's calls in sequence on one thread, as a TorchServe worker does, each with a time limit.

    Resources that a handler opens, such as a SQLite connection, may be bound to its thread. The thread is a daemon: a
    call that never returns blocks neither its caller nor the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._dead = ""
        threading.Thread(target=self._work, name=f"headrace-handler-{name}", daemon=True).start()

    def call(self, function: Callable[[], T], timeout_s: float, limit: str) -> T:
        """Call `function` on the thread; returns or raises what it does.

        Raises:
            EngineDeadError: this call or an earlier one exceeded its time limit.
        """
        if self._dead:
            raise EngineDeadError(self._dead)
        future: Future[T] = Future()
        self._calls.put((function, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the handler raised it
                raise
            self._dead = (
                f"handler {self._name} has not returned within {timeout_s:g} s; if it is slow but does not hang, raise "
                f"{limit} in its model-config.yaml"
            )
            raise EngineDeadError(self._dead) from None

    def close(self) -> None:
        """End the thread after its current call. Does not wait."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            outcome = attempted(function)
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
            del call, function, future, outcome  # an idle thread must not keep a batch alive
