"""A folder of images as records; the images are decoded later."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from headrace.errors import JobError
from headrace.io.base import Chunk
from headrace.io.storage.files import InputFile
from headrace.io.storage.locations import is_remote
from headrace.io.storage.rows import CHUNK_ROWS, todo
from headrace.records import LeftOut, Record

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"})
_REMOTE_CHUNK_ROWS = 32
"""Images per chunk from a store, whose bytes are read here."""


class ImageSource:
    """Images in the order of their names: {id: name below the folder, path, image}.

    `image` is the path, which workers open in parallel; from a store it is the file's bytes. The folder is identified
    by names, sizes and times of its files (or the store's tags), without reading every image.
    """

    def __init__(self, root: Path, files: Sequence[InputFile], left_out: Sequence[LeftOut] = ()) -> None:
        self._root = root
        self.left_out = left_out
        self._files = files
        self.total_records: int | None = len(files)
        self.total_bytes: int | None = sum(file.size or 0 for file in files)

    def describe(self) -> Mapping[str, object]:
        """Number and bytes of the images, and a digest of their names, sizes and stamps."""
        facts = [(self._name(file), file.size, file.stamp) for file in self._files]
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
        return {"format": "images", "files": len(facts), "bytes": self.total_bytes, "blake2b": digest.hexdigest()}

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """Chunks of at most 512 images, or 32 with bytes."""
        step = _REMOTE_CHUNK_ROWS if is_remote(self._root) else CHUNK_ROWS
        for start in range(0, len(self._files), step):
            stop = min(start + step, len(self._files))
            records = [self._record(position) for position in todo(start, stop, next_todo)]
            yield Chunk(records, (), sum(file.size or 0 for file in self._files[start:stop]))

    def _name(self, file: InputFile) -> str:
        return file.path.relative_to(self._root).as_posix()

    def _record(self, position: int) -> Record:
        file = self._files[position]
        file.check()
        image: object = str(file.path)
        if is_remote(file.path):
            with file.open() as stream:
                image = stream.read()
            if len(image) != file.size:
                raise JobError(f"{file.path} gave {len(image)} of its {file.size} bytes; run again to continue")
        return Record(position, position, {"id": self._name(file), "path": str(file.path), "image": image})
