"""What a model's name means: a model on the hub or in an object store, or None for a local path. Pure."""

from __future__ import annotations

import re

from headrace.errors import ConfigError
from headrace.models.base import RemoteModel
from headrace.models.hub import HubModel
from headrace.models.stores import SCHEMES, StoredModel

_ID = r"\b[\w\-.]+\b/\b[\w\-.]{1,96}\b"
_HUB = re.compile(rf"({_ID})(?:@([^\s@]+))?")
_HF = "hf://"
_OTHER_REPOSITORIES = ("datasets/", "spaces/", "buckets/", "kernels/")


def remote_model(model: str) -> RemoteModel | None:
    """The model to download that a name means; None for a local path or name.

    `org/name` and `org/name@revision` are models on the hub. `./model`, `/x/y`, `~/y` and `a/b/c` never are.

    Raises:
        ConfigError: an address that begins with hf:// and names no model.
    """
    if model.startswith(SCHEMES):
        return StoredModel(model)
    found = _HUB.fullmatch(model.removeprefix("hf://models/").removeprefix(_HF))
    if model.startswith(_HF):
        kind = next((kind for kind in _OTHER_REPOSITORIES if model.startswith(_HF + kind)), None)
        if kind is not None or found is None:
            problem = f"is in {kind.rstrip('/')}, not a model" if kind else "is not the address of a model"
            raise ConfigError(f"model {model!r} {problem}; write hf://org/name or hf://org/name@revision")
    if found is None or "--" in found[1] or ".." in found[1]:
        return None
    return HubModel(model, found[1], found[2])
