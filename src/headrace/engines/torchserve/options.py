"""The engine of TorchServe handlers, declared."""

from __future__ import annotations

from pathlib import Path

from headrace.engines.options import PANEL, PlaceOptions
from headrace.options import option


class TorchServe(PlaceOptions):
    """A TorchServe handler; `model` is the folder with the model's files, if the handler is a file."""

    task = "custom"
    engine = "torchserve"
    factory = "headrace.engines.torchserve.engine:TorchServeEngine"
    extra = "torch"
    implied_by = "handler"
    takes_model = True

    handler: str | Path | None = option(
        None, "TorchServe handler to run: a .py file or a .mar archive. Default: none.", panel=PANEL
    )
    config: str | Path | None = option(
        None, "Its model-config.yaml or config.properties. Default: one beside the model or the handler."
    )
