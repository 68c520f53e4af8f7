"""Vectors as a request asks for them: shorter where the model was trained for it, as numbers or as base64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import VectorRequest
from headrace.serving.protocol.responses import as_base64
from headrace.serving.service import Service


def vector_format(asked: VectorRequest, service: Service) -> Callable[[Any], Any]:
    """How each vector is written.

    Raises:
        ApiError: 400, for a length that the model's vectors are known not to have. The function raises it where that
            is known only when a vector is there.
    """
    wanted = asked.dimensions
    encode: Callable[[Any], Any] = as_base64 if asked.encoding_format == "base64" else _itself
    if wanted is None:
        return encode
    own = service.profile.dimension
    if own is not None and wanted != own and wanted not in service.profile.matryoshka:
        raise _no_such_length(service, wanted, own)
    return lambda vector: encode(_shortened(vector, wanted, service))


def _shortened(vector: Any, wanted: int, service: Service) -> Any:
    """The first components, at length 1 again."""
    if len(vector) == wanted:
        return vector
    if wanted not in service.profile.matryoshka:
        raise _no_such_length(service, wanted, len(vector))
    short = np.asarray(vector, dtype=np.float32)[:wanted]
    return short / max(float(np.linalg.norm(short)), 1e-12)


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


def _itself(vector: Any) -> Any:
    return vector
