"""Tar archives in webdataset's layout: adjacent members with the same name before the first dot are one record."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, Self

from headrace.errors import JobError
from headrace.io.base import Chunk
from headrace.io.formats.known import Format
from headrace.io.sources.folders import HIDDEN, group_by_reason
from headrace.io.storage.files import InputFile
from headrace.io.storage.rows import CHUNK_BYTES, CHUNK_ROWS, FileFormat, blocks
from headrace.records import Failed, Record

_COLUMNS = ("id", "path")
"""The columns of every sample that are no members."""
_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm"})
_TEXTS = frozenset({"txt", "text", "caption", "transcript"})
_NUMBERS = frozenset({"cls", "cls2", "index"})


class TarFormat(FileFormat):
    """One record per sample: {id: its key, path, and each member by its extension}.

    `.txt` is text, `.cls` an integer, `.json` any JSON value, and anything else bytes; an image is also available as
    `image`. Finished samples are not read.
    """

    name = "tar"

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """Chunks of at most 512 samples and about 4 MiB."""
        begin, told, held = base, 0, 0
        left_out: list[tuple[str, str]] = []
        records: list[Record] = []
        failures: list[Failed] = []
        compressed = file.path.suffix.lower() != ".tar"
        stream: Any = _Decompressed(file) if compressed else file.open()
        try:
            # A compressed archive is read sequentially.
            mode: Literal["r|", "r:"] = "r|" if compressed else "r:"
            with stream, tarfile.open(fileobj=stream, mode=mode, tarinfo=_Member) as archive:
                samples = _samples(archive, lambda number: next_todo(begin + number) == begin + number, left_out)
                for key, members in samples:
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
                _check_end(archive)
        except (tarfile.TarError, EOFError, OSError) as error:
            yield Chunk(records, failures, 0)
            raise JobError(f"{file.path} is damaged: {error}; what was read of it is finished and kept") from error
        file.check()
        names = ((f"{file.path.name}!{name}", reason) for name, reason in left_out)
        yield Chunk(records, failures, (file.size or 0) - told, group_by_reason(names))
        return base - begin


class _Member(tarfile.TarInfo):
    """A member's header; one that is damaged or missing is an error, which the library takes for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """The header in a block of 512 bytes.

        Raises:
            tarfile.ReadError: it is damaged, or the archive ends without an end mark.
            tarfile.HeaderError: the block is the end mark.
        """
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) < tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it is truncated: it has no end mark") from error
            if any(buf):
                raise tarfile.ReadError(f"the header of a member is no header ({error})") from error
            raise


class _Decompressed:
    """The content of a compressed archive, read once and sequentially."""

    def __init__(self, file: InputFile) -> None:
        self._blocks = blocks(file)
        self._held = b""
        self._read = 0

    def __enter__(self) -> _Decompressed:
        return self

    def __exit__(self, *_: object) -> None:
        self._held = b""

    def read(self, size: int) -> bytes:
        """Read like a file."""
        parts, left = [], size
        while left:
            if not self._held:
                block = next(self._blocks, None)
                if block is None:
                    break
                self._held, self._read = block[0], self._read + block[1]
            parts.append(self._held[:left])
            self._held = self._held[left:]
            left -= len(parts[-1])
        return b"".join(parts)

    def tell(self) -> int:
        """Bytes of the compressed file that have been read."""
        return self._read


def _check_end(archive: tarfile.TarFile) -> None:
    """Check that only zeros follow the end mark: the library would not read a second archive.

    Raises:
        tarfile.ReadError: something else follows.
    """
    stream: Any = archive.fileobj
    while content := stream.read(CHUNK_BYTES):
        if content.count(0) < len(content):
            raise tarfile.ReadError(
                "something follows its end mark, and is not read: of archives that were put one after the other, make "
                "files of their own"
            )


def _samples(
    archive: tarfile.TarFile, wanted: Callable[[int], bool], left_out: list[tuple[str, str]]
) -> Iterator[tuple[str, dict[str, bytes | str]]]:
    """Key and members of each sample; an unreadable member's reason is text. Unwanted samples have no members.

    Members that belong to no sample are added to `left_out`.
    """
    key, members, number = None, dict[str, bytes | str](), -1
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # otherwise the archive keeps every header in memory
        folder, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        if member.isdir():
            continue  # its content has separate members
        if not stem:
            left_out.append((member.name, HIDDEN))
            continue
        if (found := folder + slash + stem) != key:
            if key is not None:
                yield key, members
            key, members, number = found, {}, number + 1
        if not wanted(number):
            continue
        extension = extension.lower()
        if extension in members:
            members[extension] = f"it has more than one member {member.name}: pack each once"
        elif extension in _COLUMNS:
            members[extension] = f"its member {member.name} would replace the column {extension!r}: rename it"
        else:
            members[extension] = _content(archive, member)
    if key is not None:
        yield key, members


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | str:
    content = archive.extractfile(member) if member.isfile() else None
    if content is not None:
        return content.read()
    kind = f"a link to {member.linkname}" if member.islnk() or member.issym() else "no file"
    return f"its member {member.name} is {kind}, which is not read: pack the file itself"


def _sample(key: str, members: dict[str, bytes | str], position: int, path: str) -> Record | Failed:
    data: dict[str, object] = {"id": key, "path": path}
    try:
        for extension, content in members.items():
            if isinstance(content, str):
                raise ValueError(content)
            kind = extension.rpartition(".")[2]
            data[extension] = _value(kind, content)
            if kind in _IMAGES:
                data.setdefault("image", content)
    except (ValueError, RecursionError) as error:
        row = Record(position, key, {"id": key, "path": path})
        return Failed(row, type(error).__name__, str(error), has_id=True)
    return Record(position, position, data)


def _value(kind: str, content: bytes) -> object:
    if kind in _TEXTS:
        return content.decode()
    if kind in _NUMBERS:
        return int(content)
    return json.loads(content) if kind == "json" else content


TAR = Format(name="tar", reader=TarFormat, compressible=True)
