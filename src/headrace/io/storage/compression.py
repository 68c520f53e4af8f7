"""Reads compressed files in blocks. A truncated file is reported at its end."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from headrace.errors import JobError
from headrace.extras import require

CONTENT_BYTES = 256 * 1024
"""Maximum size of a decompressed block, to bound memory."""


class _Decoder(Protocol):
    """Decodes one compressed stream; a file may contain several."""

    errors: tuple[type[Exception], ...]
    """What `feed` raises for damaged data."""

    @property
    def eof(self) -> bool: ...

    def feed(self, data: bytes) -> bytes: ...

    @property
    def has_more(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


class _Gzip:
    errors: tuple[type[Exception], ...] = (zlib.error,)

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)

    def feed(self, data: bytes) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, CONTENT_BYTES)

    @property
    def has_more(self) -> bool:
        return bool(self._stream.unconsumed_tail)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data


class _Zstd:
    def __init__(self) -> None:
        self._stream = _zstd().ZstdDecompressor()
        self.errors: tuple[type[Exception], ...] = (_zstd().ZstdError,)

    def feed(self, data: bytes) -> bytes:
        content: bytes = self._stream.decompress(data, CONTENT_BYTES)
        return content

    @property
    def has_more(self) -> bool:
        return not self._stream.eof and not self._stream.needs_input

    @property
    def eof(self) -> bool:
        return bool(self._stream.eof)

    @property
    def unused_data(self) -> bytes:
        data: bytes = self._stream.unused_data
        return data


_DECODERS: dict[str, Callable[[], _Decoder]] = {".gz": _Gzip, ".zst": _Zstd}
SUFFIXES = tuple(_DECODERS)


def decompress_blocks(suffix: str, blocks: Iterator[tuple[bytes, int]], name: str) -> Iterator[tuple[bytes, int]]:
    """The content of a compressed file in blocks, each with its number of compressed bytes.

    Raises:
        JobError: the file is damaged or truncated; earlier content was already yielded.
    """
    make = _DECODERS[suffix]
    decoder: _Decoder | None = None
    for block, size in blocks:
        while block or (decoder is not None and decoder.has_more):
            if decoder is None:
                # Zeros after the last stream are padding from tape and block tools.
                if not (block := block.lstrip(b"\0")):
                    break
                decoder = make()
            content, block = _feed(decoder, block, name), b""
            if decoder.eof:
                block, decoder = decoder.unused_data, None
            yield content, size
            size = 0
        if size:
            yield b"", size
    if decoder is not None:
        raise JobError(f"{name} is truncated: its {suffix} stream has no end; what was read of it is finished and kept")


def compress(suffix: str, data: bytes) -> bytes:
    """Compress data as one complete stream."""
    if suffix == ".gz":
        encoder = zlib.compressobj(6, zlib.DEFLATED, 31)
        return encoder.compress(data) + encoder.flush()
    compressed: bytes = _zstd().compress(data)
    return compressed


def _feed(decoder: _Decoder, data: bytes, name: str) -> bytes:
    try:
        return decoder.feed(data)
    except decoder.errors as error:
        raise JobError(f"{name} is damaged: {error}; what was read of it is finished and kept") from error


def _zstd() -> Any:
    """The standard library's module, or its backport for Python before 3.14."""
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return require(module, "io", "reading and writing .zst files")
