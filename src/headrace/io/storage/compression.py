"""Compressed files as blocks of their content. Whether a file is whole is known at its end, and said."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from headrace.errors import JobError, MissingExtraError

CONTENT_BYTES = 256 * 1024
"""Most content given at once, however well it was compressed: memory stays bounded."""


class _Decoder(Protocol):
    """One compressed stream; a file may hold several, one behind the other."""

    errors: tuple[type[Exception], ...]
    """What `feed` raises where the data is damaged."""

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


def decompressed(suffix: str, blocks: Iterator[tuple[bytes, int]], name: str) -> Iterator[tuple[bytes, int]]:
    """The content of a compressed file, with the number of compressed bytes that each block of it stands for.

    Raises:
        JobError: the file is damaged or ends too early; what came before has been given out.
    """
    make = _DECODERS[suffix]
    decoder: _Decoder | None = None
    for block, size in blocks:
        while block or (decoder is not None and decoder.has_more):
            if decoder is None:
                # Zeros behind the last stream are padding that tape and block tools leave.
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
    """One complete stream."""
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
    """The standard library's module, or its backport to Python before 3.14."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise MissingExtraError('.zst files need backports.zstd: pip install "headrace[io]"') from error
    return zstd
