"""What the tests of the vLLM engine share. They run where vLLM is installed: scripts/test-vllm."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OPTIONS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here, and give time to what can: a core process takes long to start."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(300))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: scripts/test-vllm"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and characters for tokens."""
    from tests.integration.vllm.random_llama import save_random_llama

    return save_random_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def engine(model: Path) -> Iterator[Any]:
    """One engine for all tests that do not kill it."""
    from headrace.engines.vllm.engine import VllmEngine
    from headrace.engines.vllm.options import VllmGeneration

    engine = VllmEngine(VllmGeneration(model=model, max_tokens=12, chat=False, seed=0, **OPTIONS))
    yield engine
    engine.close()
