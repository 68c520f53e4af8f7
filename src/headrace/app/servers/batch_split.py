"""A batch whose requests name several models: one job for each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headrace.app.servers.batch_run import BatchModel, ModelRun
from headrace.engines.choosing.served import is_nameless
from headrace.errors import HeadraceError, ResumeMismatchError
from headrace.io.storage.atomic import atomic_file
from headrace.io.storage.files import look_at
from headrace.io.storage.rows import line_blocks, parse_object
from headrace.serving.batches.runs import BatchEnd, OnThread

MANIFEST = "models.json"
"""The first names of the models that the requests name."""
_OUTPUTS = ("output.jsonl", "errors.jsonl")


@dataclass(frozen=True, slots=True)
class _BatchPart:
    run: ModelRun
    folder: Path


class SplitRun:
    """One job for each model that the requests name; those of loaded models come first.

    Args:
        folder: its working folder. Each job has a folder in it, and its requests if they are not all.
        models: those of the endpoint, by all their names.
        run_of: makes the run of a model, of its requests, working folder and name in the ids of answers. A run without
            a model can only be salvaged.
    """

    def __init__(
        self,
        source: Path,
        folder: Path,
        models: Mapping[str, BatchModel],
        run_of: Callable[[BatchModel | None, Path, Path, str], ModelRun],
    ) -> None:
        self._source = source
        self._folder = folder
        self._models = models
        self._by_name = {model.bulk.server.name: model for model in models.values()}
        self._run_of = run_of
        self._parts: list[_BatchPart] = []
        self._now: ModelRun | None = None
        self._stopped = False

    @property
    def completed(self) -> int:
        return sum(part.run.completed for part in self._parts)

    @property
    def failed(self) -> int:
        return sum(part.run.failed for part in self._parts)

    async def run(self, on_thread: OnThread, /) -> BatchEnd:
        """Run the jobs to their end, or until stopped. A model that fails does not stop the others.

        Raises:
            HeadraceError: the first problem of a model. Finished records are kept.
        """
        self._parts = await on_thread(self._split)
        left, problem = list(self._parts), None
        ends: list[BatchEnd] = []
        while left and not self._stopped:
            part = min(left, key=lambda part: part.run.model.server.loaded is None)
            left.remove(part)
            self._now = part.run
            try:
                part.folder.mkdir(exist_ok=True)
                ends.append(await part.run.run(on_thread))
            except HeadraceError as error:
                problem = problem or error
        if self._stopped:
            return BatchEnd(complete=False, output=None, errors=None)
        if problem is not None:
            raise problem
        return await on_thread(lambda: self._joined(ends, complete=True))

    def stop(self) -> None:
        self._stopped = True
        if self._now is not None:
            self._now.stop()

    def salvage(self) -> BatchEnd:
        manifest = self._folder / MANIFEST
        names = json.loads(manifest.read_bytes()) if manifest.exists() else [""]
        self._parts = [part for part in self._parts_of(names) if part.folder.exists()]
        return self._joined([part.run.salvage() for part in self._parts], complete=False)

    def _joined(self, ends: list[BatchEnd], *, complete: bool) -> BatchEnd:
        """The outputs of all jobs in one file, and their errors in another."""
        if len(ends) == 1:
            return BatchEnd(complete, ends[0].output, ends[0].errors)
        joined: list[Path | None] = []
        for name, found in zip(_OUTPUTS, ([end.output for end in ends], [end.errors for end in ends]), strict=True):
            files = [path for path in found if path is not None]
            if files:
                with atomic_file(self._folder / name) as whole:
                    for path in files:
                        with path.open("rb") as one:
                            shutil.copyfileobj(one, whole, 1024 * 1024)
            joined.append(self._folder / name if files else None)
        return BatchEnd(complete, *joined)

    # -- the requests of each model -----------------------------------------------------------------------------------

    def _split(self) -> list[_BatchPart]:
        """The jobs, whose requests are in their own files if there are several. Blocks.

        Raises:
            ResumeMismatchError: a request names a model that the server does not have.
        """
        manifest = self._folder / MANIFEST
        if not manifest.exists():
            found = list(dict.fromkeys(name for name, _ in self._requests()))
            if len(found) > 1:
                self._write(found)
            with atomic_file(manifest) as file:
                file.write(json.dumps(found).encode())
        names = json.loads(manifest.read_bytes())
        if missing := sorted(set(names) - self._by_name.keys()):
            raise ResumeMismatchError(f"the batch needs model {missing[0]!r}, which this server does not have")
        return self._parts_of(names)

    def _parts_of(self, names: Sequence[str]) -> list[_BatchPart]:
        """The jobs of the models. The only one has the folder of the batch, as on a server of one model."""
        if len(names) == 1:
            run = self._run_of(self._by_name.get(names[0]), self._source, self._folder, self._folder.name)
            return [_BatchPart(run, self._folder)]
        parts = []
        for name in names:
            folder = self._folder / _folder_name(name)
            batch = f"{self._folder.name}_{folder.name}"
            run = self._run_of(self._by_name.get(name), folder.with_suffix(".jsonl"), folder, batch)
            parts.append(_BatchPart(run, folder))
        return parts

    def _write(self, names: Sequence[str]) -> None:
        with contextlib.ExitStack() as opened:
            targets: dict[str, BinaryIO] = {
                name: opened.enter_context(atomic_file((self._folder / _folder_name(name)).with_suffix(".jsonl")))
                for name in names
            }
            for name, line in self._requests():
                targets[name].write(line + b"\n")

    def _requests(self) -> Iterator[tuple[str, bytes]]:
        """Each line of the input and the first name of its model; the file was validated."""
        known = list({id(model): model for model in self._models.values()}.values())
        for lines, _ in line_blocks(look_at(self._source)):
            for line in lines:
                if not line or line.isspace():
                    continue
                name = parse_object(line)["body"].get("model")
                model = known[0] if (name is None or is_nameless(name)) and len(known) == 1 else self._models.get(name)
                if model is None:
                    needed = "a model that it does not name" if name is None else f"model {name!r}"
                    raise ResumeMismatchError(f"the batch needs {needed}, which this server does not have")
                yield model.bulk.server.name, line


def _folder_name(model: str) -> str:
    """A name that a folder may have."""
    return hashlib.sha256(model.encode()).hexdigest()[:16]
