"""The package `ts` where TorchServe is not installed: the modules that handlers import, made when they are imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MODULES = {
    "ts": "",
    "ts.context": "torchserve_context",
    "ts.handler_utils": "",
    "ts.handler_utils.hf_batch_streamer": "torchserve_tools",
    "ts.handler_utils.micro_batching": "torchserve_tools",
    "ts.handler_utils.timer": "torchserve_tools",
    "ts.handler_utils.utils": "torchserve_tools",
    "ts.metrics": "",
    "ts.metrics.caching_metric": "torchserve_metrics",
    "ts.metrics.dimension": "torchserve_metrics",
    "ts.metrics.metric": "torchserve_metrics",
    "ts.metrics.metric_type_enum": "torchserve_metrics",
    "ts.protocol": "",
    "ts.protocol.otf_message_handler": "torchserve_tools",
    "ts.service": "torchserve_tools",
    "ts.torch_handler": "",
    "ts.torch_handler.base_handler": "torchserve_base",
    "ts.torch_handler.image_classifier": "torchserve_vision",
    "ts.torch_handler.image_segmenter": "torchserve_vision",
    "ts.torch_handler.object_detector": "torchserve_vision",
    "ts.torch_handler.vision_handler": "torchserve_vision",
    "ts.utils": "",
    "ts.utils.timeit_decorator": "torchserve_tools",
    "ts.utils.util": "torchserve_tools",
}
"""What is where; a package holds nothing itself."""


class StandIn(MetaPathFinder, Loader):
    """Finds these modules after all other finders: what is installed, or lies beside the handler, comes first."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the documented shape
        target: ModuleType | None = None,  # noqa: ARG002 - likewise
    ) -> ModuleSpec | None:
        """A module that is known here."""
        where = _MODULES.get(fullname)
        return None if where is None else ModuleSpec(fullname, self, origin="headrace", is_package=not where)

    def exec_module(self, module: ModuleType) -> None:
        """Give it the public names of ours."""
        if where := _MODULES[module.__name__]:
            ours = importlib.import_module(f"headrace.engines.{where}")
            vars(module).update({name: value for name, value in vars(ours).items() if not name.startswith("_")})


def provide() -> None:
    """From now on `from ts.torch_handler.base_handler import BaseHandler` has a meaning."""
    if not any(isinstance(finder, StandIn) for finder in sys.meta_path):
        sys.meta_path.append(StandIn())
