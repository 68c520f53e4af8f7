"""Whether outputs in a 16-bit dtype are close enough to float32's, from a sample computed in both. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Output: TypeAlias = Any
"""A vector or several, a mapping with `label` and `score`, a number, or what cannot be compared."""
ComparedKind: TypeAlias = Literal["vectors", "labels", "scores"]

INT8 = "int8"
"""The value of `quantize`, and the dtype that an engine so quantised describes."""
LEAST_COSINE = 0.999
LARGEST_SCORE_DIFFERENCE = 0.01
"""For scores between 0 and 1; for others, as a share of the range of the sample's scores."""
ALLOWED_SHARE = 1 / 1_000
"""The share of labels or scores that may differ."""
LEAST_SPEED = 1.2
"""How many times as fast as float32 a product must be for a dtype to be tried."""
LEAST_GAIN = 1.1
"""How many times as fast the model must be for a dtype to be used."""
_PRODUCTS = 0.75
"""Matrix products' share of the time of a text encoder in float32 on a CPU, as profiled with all-MiniLM-L6-v2."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far outputs in a 16-bit dtype are from those in float32."""

    kind: ComparedKind
    records: int
    """Compared."""
    worst: float
    """Vectors: the least cosine. Labels and scores: the largest difference of a score."""
    changed: int
    """Labels or scores that differ; vectors that are too far away."""
    broken: int
    """Outputs that are NaN or infinite, or that failed, where float32 gave one."""

    @property
    def passes(self) -> bool:
        """Whether they are good enough to be used."""
        if self.broken or not self.records:
            return False
        return self.changed <= (0 if self.kind == "vectors" else self.records * ALLOWED_SHARE)

    def __str__(self) -> str:
        of = f"{self.records:,} record{'' if self.records == 1 else 's'}"
        if self.broken:
            return f"NaN or no output for {self.broken:,} of {of}"
        if self.kind == "vectors":
            return f"cosine >= {math.floor(self.worst * 1e6) / 1e6:.6f} on {of}"
        if self.kind == "labels":
            return f"{self.records - self.changed:,} of {of} with the same label, scores within {self.worst:.1g}"
        return f"scores within {self.worst:.1g} on {of}"


def compare(exact: Sequence[Output], other: Sequence[Output]) -> Deviation | None:
    """How far `other` is from `exact`, record by record; None if the outputs cannot be compared.

    An output is a vector or several, a mapping with `label` and `score`, or a number. Records that failed in
    float32 do not count.
    """
    pairs = [(a, b) for a, b in zip(exact, other, strict=True) if not isinstance(a, Exception) and _finite(a)]
    kind = _kind(pairs[0][0]) if pairs else None
    if kind is None:
        return None
    good = [(a, b) for a, b in pairs if not isinstance(b, Exception) and _finite(b)]
    broken = len(pairs) - len(good)
    if not good:
        return Deviation(kind, len(pairs), 0.0, 0, broken)
    if kind == "vectors":
        cosines = [_cosine(a, b) for a, b in good]
        changed = sum(cosine < LEAST_COSINE for cosine in cosines)
        return Deviation(kind, len(pairs), min(cosines), changed, broken)
    off = [abs(_score(a) - _score(b)) for a, b in good]
    if kind == "labels":
        changed = sum(a["label"] != b["label"] for a, b in good)
    else:
        scores = [_score(a) for a, _ in good]
        room = LARGEST_SCORE_DIFFERENCE * max(max(scores) - min(scores), 1.0)
        changed = sum(difference > room for difference in off)
    return Deviation(kind, len(pairs), max(off), changed, broken)


def candidates(speeds: Mapping[str, float]) -> list[str]:
    """The types worth trying, best first: bfloat16 before float16, whose largest number is 65,504, if as fast."""
    fast = [name for name, speed in speeds.items() if speed >= LEAST_SPEED]
    return sorted(fast, key=lambda name: speeds[name] * (1.25 if name == "bfloat16" else 1.0), reverse=True)


def likely_saving(speed: float) -> float:
    """The share of a job's time in float32 that a dtype saves whose products are `speed` times as fast (Amdahl's law).

    An estimate to decide whether trying it is worth the time.
    """
    return _PRODUCTS * (1 - 1 / speed) if speed > 0 else 0.0


def _kind(output: Output) -> ComparedKind | None:
    if getattr(output, "ndim", 0) in (1, 2):
        return "vectors"
    if isinstance(output, Mapping) and "label" in output and "score" in output:
        return "labels"
    return "scores" if isinstance(output, float) else None


def _finite(output: Output) -> bool:
    if hasattr(output, "ndim"):
        return all(map(math.isfinite, output.ravel().tolist()))
    return not isinstance(output, (float, Mapping)) or math.isfinite(_score(output))


def _score(output: Output) -> float:
    return float(output["score"] if isinstance(output, Mapping) else output)


def _cosine(a: Output, b: Output) -> float:
    """The cosine of two vectors, 1 if both are zero; the least one of a record with several vectors."""
    if a.ndim == 2:
        return min(map(_cosine, a, b), default=1.0)
    one, other = a.astype("float64"), b.astype("float64")
    lengths = math.sqrt(float(one @ one) * float(other @ other))
    if lengths == 0:
        return float(not one.any() and not other.any())
    return min(float(one @ other) / lengths, 1.0)
