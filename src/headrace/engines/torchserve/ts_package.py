"""Replace TorchServe's package `ts` if it is not installed: create the modules that handlers import, on import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MODULES = {
    "ts": "",
    "ts.context": "context",
    "ts.handler_utils": "",
    "ts.handler_utils.hf_batch_streamer": "tools",
    "ts.handler_utils.micro_batching": "tools",
    "ts.handler_utils.timer": "tools",
    "ts.handler_utils.utils": "tools",
    "ts.metrics": "",
    "ts.metrics.caching_metric": "context",
    "ts.metrics.dimension": "context",
    "ts.metrics.metric": "context",
    "ts.metrics.metric_type_enum": "context",
    "ts.protocol": "",
    "ts.protocol.otf_message_handler": "tools",
    "ts.service": "tools",
    "ts.torch_handler": "",
    "ts.torch_handler.base_handler": "base_handler",
    "ts.torch_handler.image_classifier": "vision",
    "ts.torch_handler.image_segmenter": "vision",
    "ts.torch_handler.object_detector": "vision",
    "ts.torch_handler.vision_handler": "vision",
    "ts.utils": "",
    "ts.utils.timeit_decorator": "tools",
    "ts.utils.util": "tools",
}
"""The module of this package behind each module of `ts`; a package is empty."""


class TsFinder(MetaPathFinder, Loader):
    """A finder for these modules that comes last: installed modules and those beside the handler take precedence."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the documented shape
        target: ModuleType | None = None,  # noqa: ARG002 - likewise
    ) -> ModuleSpec | None:
        where = _MODULES.get(fullname)
        return None if where is None else ModuleSpec(fullname, self, origin="headrace", is_package=not where)

    def exec_module(self, module: ModuleType) -> None:
        """Copy the public names of the replacement."""
        if where := _MODULES[module.__name__]:
            ours = importlib.import_module(f"headrace.engines.torchserve.{where}")
            vars(module).update({name: value for name, value in vars(ours).items() if not name.startswith("_")})


def provide() -> None:
    """Install the finder, so that `from ts.torch_handler.base_handler import BaseHandler` works."""
    if not any(isinstance(finder, TsFinder) for finder in sys.meta_path):
        sys.meta_path.append(TsFinder())
