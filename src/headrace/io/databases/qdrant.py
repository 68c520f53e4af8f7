"""A collection of Qdrant, on a server or in a local folder, as the output of a job."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from headrace.errors import ConfigError, RecordError, line_of
from headrace.extras import require
from headrace.io.formats.strict_json import StrictJson
from headrace.io.sinks.tables import Row, TableSink, is_vector
from headrace.io.storage.addresses import Address
from headrace.retry import TRANSIENT_STATUSES, PermanentIOError

if TYPE_CHECKING:
    from qdrant_client import QdrantClient
    from qdrant_client.models import PointStruct

_POINTS = 256
"""Points of a request: servers limit its size, 32 MB by default."""
_REFUSED = (400, 413, 422)
"""Statuses of a server that refuses the points of a request."""
_IDS = uuid.UUID("6f1d3a52-7f0b-4a55-9d53-0b8f9a1c2e47")
_LARGEST_ID = 2**64


class Collection:
    """Points with the output as their vector, and with `id` and the kept columns as their payload.

    A missing collection is created with cosine distance. The id of a point is the record's if that is a number or a
    UUID, else a UUID made of it.

    Args:
        address: of the collection. The password is the API key; the default is the variable QDRANT_API_KEY.
    """

    def __init__(self, address: Address, strict_json: StrictJson) -> None:
        require("qdrant_client", "qdrant", "qdrant://")
        self._address = address
        self._json = strict_json
        self._open: QdrantClient | None = None
        self._vector: tuple[str, int] | None = None
        """Name of the vector ("" for the only one) and its length."""

    def count(self, columns: Sequence[str]) -> int | None:
        """The approximate number of points; None if there is no collection."""
        name = self._address.table
        with self._as_os_errors():
            if not self._client.collection_exists(name):
                return None
            self._vector = self._find_vector(columns[-1])
            return self._client.count(name, exact=False).count

    def put(self, rows: Sequence[Row]) -> None:
        """Upsert the rows, in requests of 256."""
        column = list(rows[0])[-1]
        with self._as_os_errors():
            if self._vector is None and self._client.collection_exists(self._address.table):
                self._vector = self._find_vector(column)
            points = [self._point(row, column) for row in rows]
            if self._vector is None:
                self._create(len(rows[0][column]))
            for start in range(0, len(points), _POINTS):
                self._client.upsert(self._address.table, points[start : start + _POINTS], wait=True)

    def close(self) -> None:
        """Close the client; the next call makes another."""
        if self._open is not None:
            self._open.close()
        self._open = None

    @property
    def _client(self) -> QdrantClient:
        if self._open is None:
            from qdrant_client import QdrantClient

            if self._address.is_file:
                try:
                    self._open = QdrantClient(path=str(self._address.path))
                except RuntimeError as error:
                    raise ConfigError(f"cannot use {self._address.shown}: {line_of(error)}") from error
            else:
                self._open = QdrantClient(**self._server(), check_compatibility=False)
        return self._open

    def _server(self) -> dict[str, Any]:
        parts = urlsplit(self._address.url)
        scheme = "https" if parts.scheme.endswith("+https") else "http"
        key = unquote(parts.password) if parts.password else os.environ.get("QDRANT_API_KEY")
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return {"url": f"{scheme}://{host}:{parts.port or 6333}{parts.path}", "api_key": key, "timeout": 60}

    def _find_vector(self, column: str) -> tuple[str, int]:
        """The vector of an existing collection that takes the output. Raises ConfigError: there is none."""
        vectors = self._client.get_collection(self._address.table).config.params.vectors
        if isinstance(vectors, Mapping):
            if column not in vectors:
                raise ConfigError(f"the collection {self._address.shown} has no vector named {column!r}; add one")
            return column, vectors[column].size
        if vectors is None:
            raise ConfigError(f"the collection {self._address.shown} has no dense vector; add one")
        return "", vectors.size

    def _create(self, size: int) -> None:
        from qdrant_client.models import Distance, VectorParams

        vectors = VectorParams(size=size, distance=Distance.COSINE)
        try:
            self._client.create_collection(self._address.table, vectors_config=vectors)
        except ValueError as error:
            raise ConfigError(f"cannot create {self._address.shown}: {line_of(error)}") from error
        self._vector = "", size

    def _point(self, row: Row, column: str) -> PointStruct:
        """The point of a row. Raises RecordError: its output is not a vector of the right length."""
        from qdrant_client.models import PointStruct

        vector = row[column]
        if isinstance(vector, list) and vector and all(type(one) is int for one in vector):
            raise RecordError(f"{column} is a vector of integers, and Qdrant takes float32: use output_dtype float32")
        if not is_vector(vector):
            raise RecordError(f"{column} is of type {type(vector).__name__}, and a collection of Qdrant takes vectors")
        if not all(map(math.isfinite, vector)):
            raise RecordError(f"{column} holds NaN or an infinity, which Qdrant does not take")
        name, size = self._vector or ("", len(vector))
        if len(vector) != size:
            raise RecordError(f"{column} has {len(vector)} numbers; the vectors of the collection have {size}")
        payload = json.loads(self._json.dump({key: value for key, value in row.items() if key != column}))
        return PointStruct(id=point_id(row["id"]), vector={name: vector} if name else vector, payload=payload)

    @contextlib.contextmanager
    def _as_os_errors(self) -> Iterator[None]:
        from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

        try:
            yield
        except ResponseHandlingException as error:
            raise OSError(line_of(error)) from error
        except UnexpectedResponse as error:
            message = f"status {error.status_code}: {' '.join(error.content.decode(errors='replace').split())[:300]}"
            if error.status_code in _REFUSED:
                raise RecordError(message) from error
            raise (OSError if error.status_code in TRANSIENT_STATUSES else PermanentIOError)(message) from error
        except sqlite3.Error as error:  # of the local mode
            raise PermanentIOError(line_of(error)) from error


def point_id(record_id: object) -> int | str:
    """The id of a point, which is the same in every run: Qdrant takes numbers and UUIDs."""
    if type(record_id) is int and 0 <= record_id < _LARGEST_ID:
        return record_id
    if isinstance(record_id, str):
        with contextlib.suppress(ValueError):
            if str(uuid.UUID(record_id)) == record_id:
                return record_id
    return str(uuid.uuid5(_IDS, f"{type(record_id).__name__}:{record_id}"))


QDRANT = TableSink(open=Collection, word="collection", vectors="float32", extra="qdrant")
