"""Jobs with a model by its name: what is downloaded, what is kept, and that a job stays with its commit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.acceptance.command import headrace
from tests.integration.hub.standin import Hub

COPIES = {
    "pytorch_model.bin": b"p",
    "tf_model.h5": b"t",
    "flax_model.msgpack": b"f",
    "model.fp16.safetensors": b"h",
    "onnx/model.onnx": b"o",
    "openvino/openvino_model.xml": b"v",
    "checkpoint-10/model.safetensors": b"c",
    "README.md": b"r",
    "modeling_own.py": b"raise SystemExit",
}
OWN_CONFIG = b"""
from transformers import BertConfig
class OwnConfig(BertConfig):
    model_type = "own"
"""
OWN_MODEL = b"""
from transformers import BertModel
from .own_config import OwnConfig
class OwnModel(BertModel):
    config_class = OwnConfig
"""
RUN = ("run", "--task", "embed", "-i", "x.jsonl")


def vectors(path: Path) -> list[list[float]]:
    return [json.loads(line)["embedding"] for line in path.read_text().splitlines()]


def state(output: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((output.with_name(output.name + ".parts") / "job.json").read_text())
    return found


def test_a_job_downloads_what_its_engine_needs_and_gives_the_folder_s_vectors(
    hub: Hub, encoder: Path, work: Path
) -> None:
    commit = hub.repository("acme/encoder").commit_folder(encoder, **COPIES)
    status, said = headrace(*RUN, "--model", "acme/encoder", "-o", "y.jsonl", folder=work)
    assert status == 0, said
    assert f"loading acme/encoder at commit {commit} for embed" in said
    assert f"model               acme/encoder at commit {commit}" in said  # in the report
    needed = {path.name for path in encoder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= needed
    assert set(hub.asked) == needed
    assert set(hub.asked.values()) == {1}
    assert (state(work / "y.jsonl")["fingerprint"])["engine"]["commit"] == commit  # type: ignore[index]

    assert headrace(*RUN, "--model", encoder, "-o", "local.jsonl", folder=work)[0] == 0
    np.testing.assert_array_equal(vectors(work / "y.jsonl"), vectors(work / "local.jsonl"))


def test_a_finished_job_asks_nothing_and_needs_no_files(hub: Hub, encoder: Path, work: Path, cache: Path) -> None:
    repository = hub.repository("acme/encoder")
    repository.commit_folder(encoder)
    command = (*RUN, "--model", "acme/encoder", "-o", "y.jsonl")
    assert headrace(*command, folder=work)[0] == 0
    asked = len(hub.requests)
    repository.commit_folder(encoder, more=b"")
    shutil.rmtree(cache)
    status, said = headrace(*command, folder=work)
    assert (status, said) == (0, "headrace: y.jsonl is already finished: 2 records; nothing to do\n")
    assert len(hub.requests) == asked
    assert not cache.exists()


def test_a_full_cache_needs_no_network(hub: Hub, encoder: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.repository("acme/encoder").commit_folder(encoder)
    assert headrace(*RUN, "--model", "acme/encoder", "-o", "a.jsonl", folder=work)[0] == 0
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, said = headrace(*RUN, "--model", "acme/encoder", "-o", "b.jsonl", folder=work)
    assert status == 0, said
    assert commit in said and "gave no answer" not in said
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert len(hub.requests) == asked
    hub.faults.status = 500
    status, said = headrace(*RUN, "--model", "acme/encoder", "-o", "c.jsonl", "--dry-run", folder=work)
    assert status == 0, said
    assert "gave no answer about acme/encoder" in said and f"using commit {commit} from the cache" in said
    assert f"model       acme/encoder at commit {commit}" in said
    assert vectors(work / "a.jsonl") == vectors(work / "b.jsonl")


def test_a_job_goes_on_with_its_commit_though_the_branch_has_moved(hub: Hub, encoder: Path, work: Path) -> None:
    repository = hub.repository("acme/encoder")
    old = repository.commit_folder(encoder)
    (work / "x.jsonl").write_text('{"text": 5}\n{"text": "the canal"}\n')
    command = (*RUN, "--model", "acme/encoder", "-o", "y.jsonl")
    status, said = headrace(*command, "--max-errors", "0", folder=work)
    assert status == 1, said
    new = repository.commit_folder(encoder, **{"model.safetensors": b"another model"})

    status, said = headrace(*RUN, "--model", f"acme/encoder@{new}", "-o", "y.jsonl", folder=work)
    assert status == 2
    assert f"--model was 'acme/encoder', now 'acme/encoder@{new}'" in said

    hub.asked.clear()
    status, said = headrace(*command, "--max-error-rate", "1", folder=work)
    assert status == 3, said
    assert f"acme/encoder has moved to commit {new} since this job was begun: the job continues with {old}" in said
    assert not hub.asked  # all of it is in the cache
    assert state(work / "y.jsonl")["model"] == {"name": "acme/encoder", "commit": old}

    status, said = headrace("retry", "y.jsonl", folder=work)
    assert status == 3, said
    assert state(work / "y.jsonl")["model"] == {"name": "acme/encoder", "commit": old}


def test_a_folder_of_that_name_is_used_and_hf_means_the_hub(hub: Hub, encoder: Path, work: Path) -> None:
    hub.repository("acme/encoder").commit_folder(encoder)
    (work / "acme" / "encoder").mkdir(parents=True)
    status, said = headrace(*RUN, "--model", "acme/encoder", "-o", "y.jsonl", folder=work)
    assert status == 2
    assert "holds no config.json" in said and said.strip().endswith("for the model of the hub, hf://acme/encoder")
    assert not hub.requests
    assert headrace(*RUN, "--model", "hf://acme/encoder@main", "-o", "y.jsonl", folder=work)[0] == 0


def test_pickled_weights_are_loaded_only_if_allowed(hub: Hub, encoder: Path, work: Path) -> None:
    import torch
    from safetensors.torch import load_file

    pickled = work / "pickled"
    shutil.copytree(encoder, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    hub.repository("acme/pickled").commit_folder(pickled)
    command = (*RUN, "--model", "acme/pickled", "-o", "y.jsonl")
    status, said = headrace(*command, folder=work)
    assert status == 2
    assert "'acme/pickled' keeps its weights as pickle (pytorch_model.bin)" in said
    assert "--allow-pickled-weights" in said
    assert "pytorch_model.bin" not in hub.asked
    assert headrace(*command, "--allow-pickled-weights", folder=work)[0] == 0


def test_code_of_a_model_is_run_only_if_allowed(hub: Hub, encoder: Path, work: Path) -> None:
    own = {"own_config.py": OWN_CONFIG, "own.py": OWN_MODEL}
    facts = json.loads((encoder / "config.json").read_text())
    facts |= {"model_type": "own", "auto_map": {"AutoConfig": "own_config.OwnConfig", "AutoModel": "own.OwnModel"}}
    repository = hub.repository("acme/own")
    repository.commit_folder(encoder, **{**own, "config.json": json.dumps(facts).encode()})
    command = (*RUN, "--model", "acme/own", "-o", "y.jsonl")
    status, said = headrace(*command, folder=work)
    assert status == 2
    assert "pass --trust-remote-code if you trust it" in said
    assert not [name for name in hub.asked if name.endswith(".py")]
    status, said = headrace(*command, "--trust-remote-code", folder=work)
    assert status == 0, said
    assert "own.py" in hub.asked
