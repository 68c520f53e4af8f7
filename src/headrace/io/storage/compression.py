"""Reads compressed files in blocks. A truncated file is reported at its end."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from headrace.errors import JobError
from headrace.extras import require

CONTENT_BYTES = 256 * 1024
"""Maximum size of a decompressed block, to bound memory."""


class _Decoder:
    """Decodes one compressed stream, in bounded blocks; a file may contain several.

    The streams of zlib and of zstd differ in who keeps the input that does not fit into a block.
    """

    def __init__(self, suffix: str) -> None:
        self._keeps_input = suffix == ".zst"
        self.stream: Any = _zstd().ZstdDecompressor() if self._keeps_input else zlib.decompressobj(wbits=31)
        self.errors: type[Exception] = _zstd().ZstdError if self._keeps_input else zlib.error

    def feed(self, data: bytes) -> bytes:
        """The next block. Raises Exception: the data is damaged: see `errors`."""
        held = b"" if self._keeps_input else self.stream.unconsumed_tail
        content: bytes = self.stream.decompress(held + data, CONTENT_BYTES)
        return content

    @property
    def has_more(self) -> bool:
        """Whether it holds input for another block."""
        if self._keeps_input:
            return not self.stream.eof and not self.stream.needs_input
        return bool(self.stream.unconsumed_tail)


SUFFIXES = (".gz", ".zst")


def decompress_blocks(suffix: str, blocks: Iterator[tuple[bytes, int]], name: str) -> Iterator[tuple[bytes, int]]:
    """The content of a compressed file in blocks, each with its number of compressed bytes.

    Raises:
        JobError: the file is damaged or truncated; earlier content was already yielded.
    """
    decoder: _Decoder | None = None
    for block, size in blocks:
        while block or (decoder is not None and decoder.has_more):
            if decoder is None:
                # Zeros after the last stream are padding from tape and block tools.
                if not (block := block.lstrip(b"\0")):
                    break
                decoder = _Decoder(suffix)
            content, block = _feed(decoder, block, name), b""
            if decoder.stream.eof:
                block, decoder = decoder.stream.unused_data, None
            yield content, size
            size = 0
        if size:
            yield b"", size
    if decoder is not None:
        raise JobError(f"{name} is truncated: its {suffix} stream has no end; what was read of it is finished and kept")


def compress(suffix: str, data: bytes) -> bytes:
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


def _zstd() -> ModuleType:
    """The standard library's module, or its backport for Python before 3.14."""
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return require(module, "io", "reading and writing .zst files")
