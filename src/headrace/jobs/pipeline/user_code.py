"""The user's functions: `prepare(row)` before the model, `finish(row, output)` after it."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, cast

from headrace.batching.callables import plain_function, unfinished
from headrace.batching.results import own
from headrace.engines.custom import load_factory
from headrace.errors import BrokenOffError, ConfigError, EngineDeadError, RecordError, attempted, text_of, tried
from headrace.jobs.settings import FinishFn, JobSettings, PrepareFn, WorkerKind
from headrace.processes.child import ChildProcess
from headrace.processes.crash_isolation import CrashIsolation
from headrace.records import Record, TableRow, Unreadable

PROCESS_PAYS_S = 0.000_2
"""CPU seconds per record above which a function runs in other processes: on a thread it would hold the interpreter that
also reads, batches and writes."""


class UserCode:
    """Calls a user's functions on many records; an exception becomes the error of its record.

    Args:
        prepare: `(row) -> row`, both mappings; None leaves rows as they are.
        finish: `(row, output) -> output`, with the row as `prepare` returned it; None leaves outputs as they are.
        kind: where they run; "auto" starts on threads and measures.
        workers: number of processes.
        timeout_s: maximum seconds of a call in a process; None for no limit. A call on a thread has no limit.
    """

    def __init__(
        self,
        prepare: PrepareFn | None = None,
        finish: FinishFn | None = None,
        kind: WorkerKind = "auto",
        workers: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._prepare = prepare
        self._finish = finish
        self._kind = kind
        self._workers = workers or os.cpu_count() or 1
        self._threads: ThreadPoolExecutor | None = None
        """One thread per process, which waits for its answers."""
        self._children: queue.SimpleQueue[tuple[ChildProcess, CrashIsolation]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        for name, function in (("prepare", prepare), ("finish", finish)):
            plain_function(name, function)
        if kind == "process":
            for function in (prepare, finish):
                if function is not None and not _travels(function):
                    raise ConfigError(
                        f"{_name(function)} cannot run in another process: define it at the top of a module, or choose "
                        "threads"
                    )

    @classmethod
    def of(cls, settings: JobSettings) -> Self:
        """The functions that a job's settings name."""
        return cls(
            _loaded(settings.prepare),
            _loaded(settings.finish),
            settings.worker_kind,
            settings.limits.workers,
            settings.config.engine_timeout_s,
        )

    @property
    def prepares(self) -> bool:
        return self._prepare is not None

    @property
    def finishes(self) -> bool:
        return self._finish is not None

    @property
    def prepares_in_processes(self) -> bool:
        """Whether `prepare` runs in other processes now, where its time is not that of a thread here."""
        return self.prepares and self._kind == "process"

    def describe(self) -> Mapping[str, str]:
        """The names of the functions, for the job's fingerprint; their code is not compared."""
        named = {"prepare": self._prepare, "finish": self._finish}
        return {key: _name(function) for key, function in named.items() if function is not None}

    def prepared(self, records: Sequence[Record]) -> Iterable[tuple[Record, Record | Exception]]:
        """Each record with its prepared form or its error. Called on worker threads.

        User code receives copies, so that dead letters and retries keep the record as it was read.

        Raises:
            BrokenOffError: no process can run the function.
        """
        if not (self.prepares or self.finishes):
            return zip(records, records, strict=True)
        refused = {record.position: error for record in records if (error := _unreadable(record.data)) is not None}
        copies = [_own_copy(record) for record in records if record.position not in refused]
        if self._prepare is not None:
            rows = iter(self._call(self._prepare, [(record.data,) for record in copies]))
        else:
            rows = iter([record.data for record in copies])
        results = (refused.get(record.position) or next(rows) for record in records)
        return [
            (record, row if isinstance(row, Exception) else _mapped(record, row))
            for record, row in zip(records, results, strict=True)
        ]

    def finished(self, pairs: Sequence[tuple[object, object]]) -> Sequence[object]:
        """The output to write for each row and output, or its error.

        Raises:
            BrokenOffError: no process can run the function.
        """
        assert self._finish is not None, "asked for by `finishes`"
        return self._call(self._finish, pairs)

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        while not self._children.empty():
            self._children.get_nowait()[0].close()

    def _call(self, function: Callable[..., object], calls: Sequence[tuple[object, ...]]) -> list[object]:
        if self._kind == "process" and calls:
            return self._call_in_process(function, calls)
        started = time.thread_time()
        results = [_called(function, arguments) for arguments in calls]
        if self._kind == "auto" and calls:
            pays = (time.thread_time() - started) / len(calls) > PROCESS_PAYS_S
            self._kind = "process" if pays and self._workers > 1 and _travels(function) else "thread"
        return results

    def _call_in_process(self, function: Callable[..., object], calls: Sequence[tuple[object, ...]]) -> list[object]:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._workers, "headrace-user-code")
                for _ in range(self._workers):
                    child = ChildProcess(_applier, self._prepare, self._finish, self._timeout_s)
                    self._children.put((child, CrashIsolation(child.call)))
        size = max(1, -(-len(calls) // self._workers))
        which = "finish" if function is self._finish else "prepare"
        pieces = [
            self._threads.submit(self._survivors, [(which, call) for call in calls[start : start + size]])
            for start in range(0, len(calls), size)
        ]
        try:
            return [result for piece in pieces for result in piece.result()]
        except EngineDeadError as error:
            raise BrokenOffError(
                f"cannot run {_name(function)} in a process: {error}; finished records are kept; run again to continue"
            ) from error

    def _survivors(self, calls: Sequence[object]) -> list[object]:
        """The results of calls in one of the processes; a call that ends its process fails alone."""
        child, survivors = self._children.get()
        try:
            return survivors.results(calls)
        finally:
            self._children.put((child, survivors))


def _loaded(given: Callable[..., object] | str | None) -> Callable[..., object] | None:
    return load_factory(given) if isinstance(given, str) else given


def _own_copy(record: Record) -> Record:
    """A deep copy of the record; the record itself if it is nested too deep."""
    try:
        return Record(record.position, record.id, _copied(record.data))
    except RecursionError:
        return record


def _unreadable(row: object) -> RecordError | None:
    """The error for a row with a value that cannot be read: a function may use every column."""
    if isinstance(row, dict) and Unreadable in map(type, row.values()):
        name, value = next((name, value) for name, value in row.items() if type(value) is Unreadable)
        return RecordError(f"{value.refusal(name)}; a function (``prepare``, ``finish``) gets whole rows")
    return None


def _copied(value: object) -> object:
    if type(value) is TableRow:
        return TableRow(
            {key: inner if type(inner) is str else _copied(inner) for key, inner in value.items()}, value.exact
        )
    if type(value) is dict:
        return {key: inner if type(inner) is str else _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if type(value) is list else value


def _mapped(record: Record, row: object) -> Record | Exception:
    read = record.data
    if type(read) is TableRow and isinstance(row, dict) and type(row) in (dict, TableRow):
        exact = {name: cell for name, cell in read.exact.items() if _is_same(row.get(name), read[name])}
        return Record(record.position, record.id, TableRow(row, exact))
    if isinstance(row, Mapping):
        return Record(record.position, record.id, row)
    return RecordError(
        f"``prepare`` returned {type(row).__name__}, not a mapping of columns; return a dict for each row"
    )


def _is_same(value: object, read: object) -> bool:
    """Whether a function left a value of a table as it was, which then keeps its type there."""
    if value is read:  # NaN is not equal to itself
        return True
    return type(value) is type(read) and attempted(lambda: bool(value == read)) is True


def _called(function: Callable[..., object], arguments: tuple[object, ...]) -> object:
    """The result of the function, or its error as an Exception."""
    found = attempted(_result_of, function, arguments)
    if isinstance(found, SystemExit):
        return RecordError(f"{_name(function)} asked the process to exit with {found.code!r}")
    if isinstance(found, BaseException) and not isinstance(found, Exception):
        return RecordError(f"{_name(function)} raised {type(found).__name__}: {text_of(found)}")
    return found


def _result_of(function: Callable[..., object], arguments: tuple[object, ...]) -> object:
    result = function(*arguments)
    return unfinished(_name(function), result) or own(result)


def _applier(
    prepare: Callable[..., object] | None, finish: Callable[..., object] | None, timeout_s: float | None
) -> Callable[[Sequence[tuple[str, tuple[object, ...]]]], list[object]]:
    """A function for a child process that calls either function; a call over the limit ends the process."""
    functions = {"prepare": prepare, "finish": finish}
    # The alarm has no handler: the system ends the process, also one that is stuck in a library's own code.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def call(which: str, arguments: tuple[object, ...]) -> object:
        signal.setitimer(signal.ITIMER_REAL, timeout_s or 0)
        try:
            return _called(cast("Callable[..., object]", functions[which]), arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def apply(calls: Sequence[tuple[str, tuple[object, ...]]]) -> list[object]:
        return [call(which, arguments) for which, arguments in calls]

    return apply


def _travels(function: Callable[..., object]) -> bool:
    """Whether another process can import it."""
    if getattr(function, "__module__", None) in (None, "__main__"):
        return False
    return not isinstance(tried(pickle.dumps, function), Exception)


def _name(function: Callable[..., object]) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__)
    return f"{module}:{name}"
