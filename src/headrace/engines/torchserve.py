"""TorchServe handlers without TorchServe: `handle(data, context)` of a module or a class, with its batch settings."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.batching.callbacks import plain_function
from headrace.device.placement import choose_device
from headrace.engines import torchserve_files
from headrace.engines.base import Prepared
from headrace.engines.torchserve_context import Context
from headrace.engines.torchserve_files import HandlerFiles
from headrace.errors import BadResultError, ConfigError, EngineDeadError, EngineError, RecordError

_SHIM = "headrace.engines.torchserve_base"


class TorchServeEngine:
    """A handler as TorchServe calls it: rows of `{"body": ...}` in, one answer for each out.

    A text comes to the handler as the bytes of a request, an object or a list as parsed JSON. The batch is never
    larger than the handler's own setting, and waits no longer for company than that says. An answer with a status of
    400 or more (`context.set_response_status`) is that record's error.

    Args:
        model: the folder with the model's files, where the handler is a file.
        handler: a handler file, `file.py:function`, a .mar archive or a folder with its content.
        config: a model-config.yaml or config.properties; None for one beside the model or the handler.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N"; the handler is told its number.

    Raises:
        ConfigError: a file is missing or cannot be understood, or the handler is none.
        EngineError: the handler cannot be imported or initialized.
    """

    pads = False
    counts_tokens = False

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        handler: str | Path | None = None,
        config: str | Path | None = None,
        device: str = "auto",
    ) -> None:
        if handler is None:
            raise ConfigError("no handler is named; give a handler file, a .mar archive or its folder")
        place = choose_device(device)
        gpu = None if place.type == "cpu" else place.index or 0
        self._files = torchserve_files.read(handler, model, config)
        self._context = Context(self._files, gpu)
        self._handle: Callable[[Any, Context], Any] | None = None
        try:
            self._handle = _load(self._files, self._context)
        finally:
            if self._handle is None:
                self.close()
        self.default_batch_size = self.default_batch_cost = self._files.batch_size
        self.default_batch_delay_s = self._files.batch_delay_s
        """How long the oldest record waits for company while the handler has nothing to do."""

    def describe(self) -> Mapping[str, Any]:
        """Digests of the handler and of the model's files."""
        total = hashlib.blake2b(digest_size=16)
        for path in sorted(self._files.model_dir.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                with path.open("rb") as file:
                    total.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
        code = hashlib.blake2b(self._files.handler.read_bytes(), digest_size=16).hexdigest()
        return {"engine": "torchserve", "handler_digest": code, "model_digest": total.hexdigest()}

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[dict[str, Any]] | Exception]:
        """One row of a request each; a RecordError where the value cannot be one."""
        return [_row(value) for value in inputs]

    def forward(self, batch: list[dict[str, Any]]) -> list[Any]:
        """The handler's answer for each row.

        Raises:
            BadResultError: the handler's answer is no list, or not as long as the batch.
            EngineDeadError: the engine is closed.
        """
        handle = self._handle
        if handle is None:
            raise EngineDeadError("the engine is closed; create a new one")
        if not batch:
            return []
        self._context.begin(len(batch))
        answers = handle([dict(row) for row in batch], self._context)
        if not isinstance(answers, (list, tuple)):
            raise BadResultError(f"the handler returned a {type(answers).__name__}; it must return a list")
        if len(answers) != len(batch):
            raise BadResultError(f"the handler returned {len(answers)} results for batch of {len(batch)}")
        return [self._context.refusal(index) or _plain(answer) for index, answer in enumerate(answers)]

    def close(self) -> None:
        """Let the handler go, and an archive's files. Safe to call twice."""
        self._handle = None
        if self._files.unpacked is not None:
            self._files.unpacked.cleanup()


def _row(value: Any) -> Prepared[dict[str, Any]] | Exception:
    if value is None:
        return RecordError("the value is null; a handler's request has a body")
    if isinstance(value, str):
        try:
            value = bytearray(value.encode())
        except UnicodeEncodeError as error:
            return RecordError(f"the text is not valid Unicode: {error.reason} at character {error.start}")
    elif isinstance(value, (bytes, memoryview)):
        value = bytearray(value)
    return Prepared({"body": value}, cost=1)


def _plain(answer: Any) -> Any:
    if not isinstance(answer, (bytes, bytearray)):
        return answer
    try:
        return answer.decode()
    except UnicodeDecodeError:
        return bytes(answer)


def _load(files: HandlerFiles, context: Context) -> Callable[[Any, Context], Any]:
    """The handler's entry point, initialized."""
    _provide_base_handler()
    module = _import_file(files.handler, files.model_dir)
    name = files.function or "handle"
    try:
        if hasattr(module, name):
            function: Callable[[Any, Context], Any] = getattr(module, name)
            plain_function(f"{name} of {files.handler.name}", function)
            function(None, context)  # by convention: no data asks a function to load its model
            return function
        service = _the_class(module, files)()
        service.initialize(context)
    except ConfigError:
        raise
    except Exception as error:  # the user's code: whatever it raises, its job does not start
        raise EngineError(
            f"handler {files.handler.name} cannot be initialized: {type(error).__name__}: {error}"
        ) from error
    plain_function(f"handle of {files.handler.name}", service.handle)
    handle: Callable[[Any, Context], Any] = service.handle
    return handle


def _the_class(module: ModuleType, files: HandlerFiles) -> Any:
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
            f"handler {files.handler.name} must have {wanted}; classes with one: "
            f"{', '.join(kind.__name__ for kind in classes) or 'none'}"
        )
    return classes[0]


def _import_file(file: Path, model_dir: Path) -> ModuleType:
    """The handler as a module of its own name, which may import what lies beside it or beside the model."""
    for folder in (str(file.parent), str(model_dir)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "it is a .py file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise EngineError(f"handler {file.name} cannot be imported: {error}; install what it needs first") from error
    return module


def _provide_base_handler() -> None:
    """Give `from ts.torch_handler.base_handler import BaseHandler` a meaning where TorchServe is not installed."""
    if "ts" in sys.modules or importlib.util.find_spec("ts") is not None:
        return
    names = ("ts", "ts.torch_handler", "ts.torch_handler.base_handler")
    modules = (ModuleType(names[0]), ModuleType(names[1]), importlib.import_module(_SHIM))
    for name, module, inside in zip(names, modules, (None, *modules), strict=False):
        sys.modules[name] = module
        if inside is not None:
            setattr(inside, name.rpartition(".")[2], module)
    for package in modules[:2]:
        package.__path__ = []  # what makes it one: other names in it are looked for, and found missing
