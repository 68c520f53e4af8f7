"""The public names: those of the package, and those that each room says it offers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import headrace
from headrace.engines.choosing.config import EngineConfig

PACKAGE = Path(headrace.__file__).parent
ROOMS = sorted(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
PUBLIC = [
    "BatchStats", "Batched", "Batcher", "BlockedLoopWarning", "ContinuousBatcher", "CostEstimator", "CostEstimatorFn",
    "Done", "DynamicBatcher", "EngineProfile", "MLflowListener", "ModelPool", "NoTokenEstimateWarning", "Prepared",
    "Prompt", "ReusablePool", "StepFunction", "StepModel", "TokenBatcher", "TokenEstimator", "TokenEstimatorFn",
    "WandbListener", "batched", "errors", "map_batches", "map_concurrent", "reusable", "run",
    "LoadedModel", "RunningJob", "arun", "load",
    # tasks, and engines with their options
    "JobSettings", "Limits", "Selection", "ServeLimits", "ServerSettings",
    "EngineOptions", "Task", "Classification", "Embedding", "Endpoint", "EndpointClassification", "EndpointEmbedding",
    "Generation", "ImageClassification", "ImageEmbedding", "MultiVectorEmbedding", "OnnxClassification",
    "OnnxEmbedding", "OnnxImageClassification", "OnnxImageEmbedding", "OnnxScoring", "OnnxZeroShot", "Scoring",
    "SparseEmbedding", "StaticGeneration", "TorchServe", "VllmClassification", "VllmEmbedding", "VllmGeneration",
    "VllmScoring", "ZeroShot",
]  # fmt: skip
OFFER = re.compile(r"^- `(\w+)\.(\w+)`: ", re.MULTILINE)


def names(file: Path) -> set[str]:
    """What a module defines."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return found


def test_the_package_offers_these_names_and_no_other() -> None:
    assert sorted(headrace.__all__) == sorted(PUBLIC)
    assert all(hasattr(headrace, name) for name in [*PUBLIC, "build_app"])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_offers_and_has_it(room: str) -> None:
    source = (PACKAGE / room / "__init__.py").read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    offers = OFFER.findall(said)
    has_modules = any(path.name != "__init__.py" for path in (PACKAGE / room).glob("*.py"))
    assert offers or not has_modules, f"{room}/__init__.py does not say what the room offers"
    for module, name in offers:
        assert name in names(PACKAGE / room / f"{module}.py"), f"{room} offers {module}.{name}, which does not exist"


def test_an_engine_s_configuration_has_these_fields() -> None:
    fields = ("task", "model", "engine", "engine_options", "batch_tokens", "batch_size")
    assert EngineConfig.__slots__ == (*fields, "engine_process", "engine_timeout_s", "pickled_weights", "commit")
