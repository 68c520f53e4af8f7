"""Vectors in the format a request asks for: shortened to `dimensions`, as numbers or base64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import VectorRequest
from headrace.serving.protocol.responses import as_base64
from headrace.serving.service import Service

Vector: TypeAlias = Sequence[float] | NDArray[np.float32]


def vector_format(body: VectorRequest, service: Service) -> Callable[[Vector], object]:
    """A function that formats each vector of the response.

    Raises:
        ApiError: 400 for `dimensions` that the model does not have. If the model's length is unknown, the returned
            function raises it.
    """
    wanted = body.dimensions
    encode: Callable[[Vector], object] = as_base64 if body.encoding_format == "base64" else _itself
    if wanted is None:
        return encode
    own = service.profile.dimension
    if own is not None and wanted != own and wanted not in service.profile.matryoshka:
        raise _no_such_length(service, wanted, own)
    return lambda vector: encode(_shortened(vector, wanted, service))


def _shortened(vector: Vector, wanted: int, service: Service) -> Vector:
    """The first `wanted` components, normalized."""
    if len(vector) == wanted:
        return vector
    if wanted not in service.profile.matryoshka:
        raise _no_such_length(service, wanted, len(vector))
    short = np.asarray(vector, dtype=np.float32)[:wanted]
    normalized: NDArray[np.float32] = short / max(float(np.linalg.norm(short)), 1e-12)
    return normalized


def _no_such_length(service: Service, wanted: int, own: int) -> ApiError:
    lengths = service.profile.matryoshka
    known = (
        f"1 to {own}" if isinstance(lengths, range) else ", ".join(str(length) for length in sorted({own, *lengths}))
    )
    return ApiError(
        400,
        f"dimensions is {wanted}: vectors of the model {service.name!r} have {known} components",
        code="bad_dimensions",
        param="dimensions",
    )


def _itself(vector: Vector) -> Vector:
    return vector
