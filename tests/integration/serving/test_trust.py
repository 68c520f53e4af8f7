"""What a model's folder brings besides numbers is not run unless asked for."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.serving.running import running
from tests.settings import server_settings

from headrace.app.servers.server import build
from headrace.engines.model_folder import find_folder, pickled_weights
from headrace.errors import ConfigError, EngineError

CODE = """
from pathlib import Path
from transformers import BertModel
from .own_config import OwnConfig
Path({mark!r}).write_text("run")
class OwnModel(BertModel):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(find_folder(None), tmp_path / "model"))


def embeds(folder: Path, *, trust_remote_code: bool = False, pickled_weights: bool = False) -> int:
    """In given numbers and batches, so that none are tried."""
    options = {"dtype": "float32", "trust_remote_code": trust_remote_code}
    given = {"batch_tokens": 256, "engine_options": options, "pickled_weights": pickled_weights}
    with running(server_settings(model=str(folder), **given)) as server:
        return len(server.post("/v1/embeddings", {"input": "a text"}).json()["data"][0]["embedding"])


def refused(match: str, **settings: Any) -> None:
    app, _ = build(server_settings(**settings))

    async def begin() -> None:
        async with app.router.lifespan_context(app):
            raise AssertionError("it was loaded")

    with pytest.raises((ConfigError, EngineError), match=match):
        asyncio.run(begin())


def test_pickled_weights_are_refused_unless_asked_for(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    torch.save({}, folder / "optimizer.pt")
    assert pickled_weights(folder) == []  # the safetensors beside it are what is loaded
    weights.unlink()
    assert pickled_weights(folder) == [folder / "pytorch_model.bin"]
    refused("pytorch_model.bin.*pickled_weights=True", model=str(folder))
    assert embeds(folder, pickled_weights=True) == 384


def test_a_models_own_code_is_not_run_unless_asked_for(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoModel": "own.OwnModel", "AutoConfig": "own_config.OwnConfig"}}
    (folder / "own_config.py").write_text(
        'from transformers import BertConfig\nclass OwnConfig(BertConfig):\n    model_type = "own"\n'
    )
    (folder / "config.json").write_text(json.dumps(config))
    refused("contains custom code", model=str(folder))
    assert not mark.exists()
    assert embeds(folder, trust_remote_code=True) == 384
    assert mark.exists()
