"""A user's own functions at both ends of a job: `prepare(row)` before the model, `finish(row, output)` after it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, Literal, TypeAlias

from headrace.errors import BrokenOffError, ConfigError, RecordError
from headrace.records import Record

WorkerKind: TypeAlias = Literal["auto", "thread", "process"]

PROCESS_PAYS_S = 0.000_2
"""CPU time of a function, in seconds per record, from which carrying records to another process is the cheaper way: the
function would else hold the interpreter that also reads, batches and writes."""


class UserCode:
    """Calls a user's functions, many records at a time; what they raise is that record's own error.

    Args:
        prepare: `(row) -> row`, both mappings; None leaves rows as they are.
        finish: `(row, output) -> output`, with the row as `prepare` returned it; None leaves outputs as they are.
        kind: where they run; "auto" begins on threads and measures.
        workers: processes, where they run in processes.
    """

    def __init__(
        self,
        prepare: Callable[[Any], Any] | None = None,
        finish: Callable[[Any, Any], Any] | None = None,
        kind: WorkerKind = "auto",
        workers: int | None = None,
    ) -> None:
        self._prepare = prepare
        self._finish = finish
        self._kind = kind
        self._workers = workers or os.cpu_count() or 1
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()
        if kind == "process":
            for function in (prepare, finish):
                if function is not None and not _travels(function):
                    raise ConfigError(
                        f"{_name(function)} cannot run in another process: define it at the top of a module, or choose "
                        "threads"
                    )

    @property
    def finishes(self) -> bool:
        """Whether there is a `finish`, which wants to see the row."""
        return self._finish is not None

    def describe(self) -> Mapping[str, str]:
        """What names the functions in a job's fingerprint; their code is not looked at."""
        named = {"prepare": self._prepare, "finish": self._finish}
        return {key: _name(function) for key, function in named.items() if function is not None}

    def prepared(self, records: Sequence[Record]) -> Iterable[tuple[Record, Record | Exception]]:
        """Each record, and what was made of it or why nothing could be. Called on worker threads.

        User code sees copies: for a dead letter or another try a record stays as it was read.

        Raises:
            BrokenOffError: a worker process is gone.
        """
        if self._prepare is None:
            return zip(records, map(_own_copy, records) if self.finishes else records, strict=True)
        rows = self._call(self._prepare, [(_own_copy(record).data,) for record in records])
        return [
            (record, row if isinstance(row, Exception) else _mapped(record, row))
            for record, row in zip(records, rows, strict=True)
        ]

    def finished(self, pairs: Sequence[tuple[Any, Any]]) -> Sequence[Any]:
        """For each row and output the output to write, or why there is none.

        Raises:
            BrokenOffError: a worker process is gone.
        """
        assert self._finish is not None, "asked for by `finishes`"
        return self._call(self._finish, pairs)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _call(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        if self._kind == "process" and calls:
            return self._call_in_process(function, calls)
        started = time.thread_time()
        results = _apply(function, calls)
        if self._kind == "auto" and calls:
            pays = (time.thread_time() - started) / len(calls) > PROCESS_PAYS_S
            self._kind = "process" if pays and self._workers > 1 and _travels(function) else "thread"
        return results

    def _call_in_process(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._lock:
            if self._pool is None:
                # A fork of a process that has threads, as this one has, may hang.
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self._workers, context, initializer=_die_with_parent)
        size = max(1, -(-len(calls) // self._workers))
        try:
            pieces = [
                self._pool.submit(_apply_and_pack, function, calls[start : start + size])
                for start in range(0, len(calls), size)
            ]
            results: list[Any] = []
            for piece in pieces:
                results += pickle.loads(piece.result())
        except BrokenProcessPool as error:
            raise BrokenOffError(
                f"a worker process ended while it ran {_name(function)}; what is finished is kept, run again to go on"
            ) from error
        return results


def _own_copy(record: Record) -> Record:
    """The same record in dicts and lists of its own; the record itself where it is nested too deep for that."""
    try:
        return Record(record.position, record.id, _copied(record.data))
    except RecursionError:
        return record


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: inner if type(inner) is str else _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if type(value) is list else value


def _mapped(record: Record, row: Any) -> Record | Exception:
    if isinstance(row, Mapping):
        return Record(record.position, record.id, row)
    return RecordError(f"prepare returned {type(row).__name__}, not a mapping of columns")


def _apply(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    results: list[Any] = []
    for arguments in calls:
        try:
            results.append(function(*arguments))
        except SystemExit as error:
            results.append(RecordError(f"{_name(function)} asked the process to exit with {error.code!r}"))
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it is its record's
            results.append(error)
    return results


def _apply_and_pack(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> bytes:
    """`_apply` in a child: a result that cannot travel is its record's error."""
    results = _apply(function, calls)
    try:
        packed = pickle.dumps(results)
        pickle.loads(packed)
    except (pickle.PicklingError, TypeError, AttributeError):
        packed = pickle.dumps([_portable(result) for result in results])
    return packed


def _portable(result: Any) -> Any:
    try:
        pickle.loads(pickle.dumps(result))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        if isinstance(result, Exception):
            return RecordError(f"{type(result).__name__}: {result}")
        return RecordError(f"a result of type {type(result).__name__} cannot leave its process: {error}")
    return result


def _travels(function: Callable[..., Any]) -> bool:
    """Whether another process can import it."""
    if getattr(function, "__module__", None) in (None, "__main__"):
        return False
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _die_with_parent() -> None:
    """In a child: Ctrl-C is the parent's to handle, and no child outlives a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a child"
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="headrace-parent", daemon=True).start()


def _name(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__)
    return f"{module}:{name}"
