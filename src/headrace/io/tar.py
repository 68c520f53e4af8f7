"""Tar archives as webdataset packs them: neighbours with the same name before the first dot are one record."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Generator, Iterator
from typing import Any

from headrace.errors import JobError
from headrace.io.base import Chunk
from headrace.io.files import CHUNK_BYTES, CHUNK_ROWS, InputFile
from headrace.records import Failed, Record

_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm"})
_TEXTS = frozenset({"txt", "text", "caption", "transcript"})
_NUMBERS = frozenset({"cls", "cls2", "index"})


class TarFormat:
    """One record per sample: {id: its key, path, and each member by its extension}.

    `.txt` is text, `.cls` an integer, `.json` any JSON value, and anything else bytes; an image is there a second time
    as `image`. Only the bytes of samples still to do are read.
    """

    name = "tar"

    def count(self, file: InputFile) -> int | None:  # noqa: ARG002 - the seam's shape
        """Unknown without reading all headers."""
        return None

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """A chunk is at most 512 samples and about 4 MiB."""
        begin, told, held = base, 0, 0
        records: list[Record] = []
        failures: list[Failed] = []
        compressed = file.path.suffix.lower() != ".tar"
        try:
            # A compressed archive is a stream: its members are read on the way.
            with file.open() as stream, tarfile.open(fileobj=stream, mode="r|*" if compressed else "r:") as archive:
                for key, members in _samples(archive, lambda number: next_todo(begin + number) == begin + number):
                    if members:
                        outcome = _sample(key, members, base, f"{file.path}!{key}")
                        (failures if isinstance(outcome, Failed) else records).append(outcome)  # type: ignore[arg-type]
                        held += sum(len(content) for content in members.values())
                    base += 1
                    if held >= CHUNK_BYTES or (base - begin) % CHUNK_ROWS == 0:
                        file.check()
                        at = min(stream.tell(), file.size or 0)
                        yield Chunk(records, failures, at - told)
                        records, failures, told, held = [], [], at, 0
        except (tarfile.TarError, EOFError, OSError) as error:
            raise JobError(f"{file.path} is damaged or truncated: {error}; what was read of it is kept") from error
        file.check()
        yield Chunk(records, failures, (file.size or 0) - told)
        return base - begin


def _samples(archive: tarfile.TarFile, wanted: Callable[[int], bool]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key and members of each sample; no members where it is not wanted."""
    key, members, number = None, dict[str, bytes](), -1
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # else the archive remembers every header it has seen
        folder, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        if not member.isfile() or not stem:
            continue
        if (found := folder + slash + stem) != key:
            if key is not None:
                yield key, members
            key, members, number = found, {}, number + 1
        if wanted(number) and (content := archive.extractfile(member)) is not None:
            members[extension.lower()] = content.read()
    if key is not None:
        yield key, members


def _sample(key: str, members: dict[str, bytes], position: int, path: str) -> Record | Failed:
    data: dict[str, Any] = {"id": key, "path": path}
    try:
        for extension, content in members.items():
            kind = extension.rpartition(".")[2]
            data[extension] = _value(kind, content)
            if kind in _IMAGES:
                data.setdefault("image", content)
    except ValueError as error:
        return Failed(Record(position, key, {"id": key, "path": path}), type(error).__name__, str(error))
    return Record(position, position, data)


def _value(kind: str, content: bytes) -> Any:
    if kind in _TEXTS:
        return content.decode()
    if kind in _NUMBERS:
        return int(content)
    return json.loads(content) if kind == "json" else content
