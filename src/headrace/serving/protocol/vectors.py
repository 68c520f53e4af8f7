"""Vectors in the format a request asks for: shortened to `dimensions`, as numbers or base64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.engines.networks.quantizing import quantized
from headrace.engines.options import OutputDtype
from headrace.errors import RecordError
from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import VectorRequest
from headrace.serving.protocol.responses import as_base64
from headrace.serving.service import Service

T = TypeVar("T")
VectorNumbers: TypeAlias = Sequence[float] | NDArray[np.float32] | NDArray[np.int8] | NDArray[np.uint8]


def vector_format(body: VectorRequest, service: Service) -> Callable[[VectorNumbers], object]:
    """A function that formats each vector of a response to OpenAI's request. Raises as `shortener`."""
    if body.model_fields_set.isdisjoint(VectorRequest.__annotations__):
        return as_it_is
    shorten, wanted = shortener(body.length, service), body.dtype
    scaled = (lambda vector: normalized(shorten(vector))) if body.normalized else shorten
    made = scaled if wanted == "float32" else lambda vector: _quantized(scaled(vector), wanted)
    if not body.as_base64:
        return made
    return lambda vector: as_base64(made(vector))


def as_it_is(output: T) -> T:
    return output


def _quantized(vector: VectorNumbers, wanted: OutputDtype) -> VectorNumbers:
    [found] = quantized(np.asarray([vector], dtype=np.float32), wanted)
    if isinstance(found, RecordError):
        raise found
    return found


def normalized(vector: VectorNumbers) -> VectorNumbers:
    """The vector, scaled to length 1."""
    values = np.asarray(vector, dtype=np.float32)
    scaled: NDArray[np.float32] = values / max(float(np.linalg.norm(values)), 1e-12)
    return scaled


def shortener(wanted: int | None, service: Service) -> Callable[[VectorNumbers], VectorNumbers]:
    """A function that shortens each vector to `wanted` components, and normalizes it again.

    Raises:
        ApiError: 400 for `dimensions` that the model does not have. If the model's length is unknown, the returned
            function raises it.
    """
    if wanted is None:
        return as_it_is
    own = service.profile.dimension
    if own is not None and wanted != own and wanted not in service.profile.matryoshka:
        raise _no_such_length(service, wanted, own)
    return lambda vector: _shortened(vector, wanted, service)


def _shortened(vector: VectorNumbers, wanted: int, service: Service) -> VectorNumbers:
    """The first `wanted` components, normalized."""
    if len(vector) == wanted:
        return vector
    if wanted not in service.profile.matryoshka:
        raise _no_such_length(service, wanted, len(vector))
    return normalized(vector[:wanted])


def _no_such_length(service: Service, wanted: int, own: int) -> ApiError:
    lengths = service.profile.matryoshka
    known = (
        f"1 to {own}" if isinstance(lengths, range) else ", ".join(str(length) for length in sorted({own, *lengths}))
    )
    return ApiError(
        400,
        f"dimensions is {wanted}: vectors of the model {service.name!r} have {known} components"
        + ("" if lengths else '; config.json of a Matryoshka model says "is_matryoshka": true'),
        code="bad_dimensions",
        param="dimensions",
    )
