"""A model that cannot be used is refused in one line with the way out, before its weights are downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.acceptance.command import headrace
from tests.integration.hub.standin import Hub

BERT = {"model_type": "bert", "architectures": ["BertModel"]}
CODE = {"auto_map": {"AutoModel": "modeling_own.OwnModel"}}


def refused(work: Path, *flags: str) -> str:
    """What a job that must not start says."""
    status, said = headrace("run", "-i", "x.jsonl", "-o", "y.jsonl", *flags, folder=work, imported="torch")
    assert status == 2, said
    lines = [line for line in said.splitlines() if not line.startswith("headrace: loading ")]
    assert len(lines) == 1, said
    assert not (work / "y.jsonl").exists()
    return lines[0]


def config(**more: object) -> bytes:
    return json.dumps({**BERT, **more}).encode()


def test_a_wrong_name_is_named_as_folder_and_as_model(hub: Hub, work: Path) -> None:
    said = refused(work, "--model", "models/foo")
    assert "'models/foo': there is no folder of that name, and http://127.0.0.1" in said
    assert "has no such model; check the spelling" in said and "HF_TOKEN" in said


@pytest.mark.parametrize("model", ["./models/foo", "/models/foo", "../foo", "a/b/c", "foo", "~/foo"])
def test_a_path_is_never_a_name(hub: Hub, work: Path, model: str) -> None:
    assert "no such folder; give a local model folder" in refused(work, "--model", model)
    assert not hub.requests


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("hf://datasets/acme/texts", "is in datasets, not a model; write hf://org/name"),
        ("hf://acme", "is not the address of a model; write hf://org/name"),
        ("hf://acme/encoder/sub", "is not the address of a model; write hf://org/name"),
    ],
)
def test_an_address_of_something_else_is_refused(hub: Hub, work: Path, model: str, words: str) -> None:
    assert words in refused(work, "--model", model)


def test_a_revision_that_does_not_exist_is_named(hub: Hub, work: Path) -> None:
    hub.repository("acme/encoder").commit({"config.json": config()})
    assert "acme/encoder has no revision 'v9'" in refused(work, "--model", "acme/encoder@v9")
    vllm = ("--task", "generate", "--engine", "vllm", "--revision", "v9")
    assert "write --model acme/encoder@REVISION" in refused(work, *vllm, "--model", "acme/encoder")


def test_a_gated_model_says_where_to_accept_its_conditions(
    hub: Hub, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.repository("acme/gated")
    repository.commit({"config.json": config(), "model.safetensors": b"w"})
    repository.gated = True
    said = refused(work, "--model", "acme/gated")
    for part in ("is gated", f"{hub.url}/acme/gated", "hf auth login", "HF_TOKEN"):
        assert part in said
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "refuses the request (401)" in refused(work, "--model", "acme/gated")


def test_a_private_model_needs_the_right_token(hub: Hub, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.repository("acme/private")
    repository.commit({"config.json": config()})
    repository.private = True
    assert "for a private model, log in (hf auth login) or set HF_TOKEN" in refused(work, "--model", "acme/private")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "for a private model, use a token that may read it" in refused(work, "--model", "acme/private")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert "holds no weights" in refused(work, "--model", "acme/private")


def test_without_a_network_the_endpoint_is_named(hub: Hub, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    said = refused(work, "--model", "acme/encoder")
    assert "there is no folder of that name, and http://127.0.0.1:9 cannot be reached" in said
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids downloads" in refused(work, "--model", "acme/encoder")


@pytest.mark.parametrize(("status", "words"), [(503, "answers (503)"), (429, "limits requests (429)")])
def test_a_hub_in_trouble_is_named(hub: Hub, work: Path, status: int, words: str) -> None:
    hub.faults.status = status
    said = refused(work, "--model", "acme/encoder")
    assert words in said and "try again later" in said


def test_a_hub_that_does_not_answer_is_given_up(hub: Hub, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults.wait_s = 20
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    assert "did not answer in time" in refused(work, "--model", "acme/encoder")


@pytest.mark.parametrize(
    ("task", "files", "words"),
    [
        (
            "embed",
            {"config.json": config(architectures=["BertForSequenceClassification"]), "model.safetensors": b"w"},
            "use the task classify",
        ),
        ("embed", {"config.json": config()}, "holds no weights (*.safetensors)"),
        ("embed", {"config.json": config(), "onnx/model.onnx": b"o"}, "choose the engine onnx (--engine onnx)"),
        ("embed", {"config.json": config(), "tf_model.h5": b"t"}, "holds only TensorFlow weights"),
        ("embed", {"model-q4.gguf": b"g"}, "holds only GGUF files"),
        ("embed", {"model_index.json": b"{}", "unet/config.json": b"{}"}, "is a pipeline of diffusers"),
        ("embed", {"README.md": b"r"}, "holds no config.json"),
        ("embed", {"config.json": config(model_type="martian"), "model.safetensors": b"w"}, "does not know"),
        (
            "embed",
            {"config.json": config(model_type="martian", **CODE), "model.safetensors": b"w"},
            "martian; it brings Python code of its own: pass --trust-remote-code if you trust it",
        ),
        (
            "generate",
            {
                "config.json": config(architectures=["MForCausalLM"], model_type="martian", **CODE),
                "model.safetensors": b"w",
            },
            "martian; it needs Python code of its own, which task 'generate' does not run",
        ),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_before_its_weights_are_downloaded(
    hub: Hub, work: Path, task: str, files: dict[str, bytes], words: str
) -> None:
    hub.repository("acme/other").commit(files)
    said = refused(work, "--task", task, "--model", "acme/other")
    assert "model 'acme/other'" in said and words in said
    assert set(hub.asked) <= {"config.json", "modules.json", "model_index.json"}


def test_code_of_another_repository_is_refused(hub: Hub, work: Path) -> None:
    foreign = {"auto_map": {"AutoModel": "acme/code--modeling.OwnModel"}}
    files = {"config.json": config(model_type="martian", **foreign), "model.safetensors": b"w"}
    hub.repository("acme/other").commit(files)
    said = refused(work, "--model", "acme/other", "--trust-remote-code")
    assert "runs Python code of another repository, acme/code" in said


def test_onnx_files_without_the_usual_name_are_listed(hub: Hub, work: Path) -> None:
    hub.repository("acme/other").commit({"config.json": config(), "a.onnx": b"a", "b.onnx": b"b"})
    said = refused(work, "--engine", "onnx", "--model", "acme/other")
    assert "'acme/other' holds several ONNX files (a.onnx, b.onnx)" in said


def test_a_sparse_model_is_known_by_its_name(hub: Hub, work: Path) -> None:
    masked = config(architectures=["BertForMaskedLM"])
    hub.repository("acme/splade-x").commit({"config.json": masked, "model.safetensors": b"w"})
    assert "is a sparse (SPLADE) encoder" in refused(work, "--model", "acme/splade-x")
