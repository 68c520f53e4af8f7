"""vLLM's pooling runner: the vectors, labels and scores that transformers computes for each text alone."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.acceptance.serving.process import server
from tests.families import family_model
from tests.integration.vllm.test_jobs import PROGRAM, write

from headrace.batching.passthrough import PassthroughBatcher
from headrace.engines.choosing import registry
from headrace.errors import ConfigError, EngineError, RecordError

SMALL = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8}
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8")
WIDE: dict[str, Any] = {"hidden_size": 64}  # vLLM's attention on CPU needs heads of 32
PROMPTS = {"query": "the mill: ", "document": ""}
WORDS = "the canal feeds a mill and its wheel turns so that it never runs dry".split()  # noqa: SIM905


def texts(count: int) -> list[str]:
    draw = random.Random(1)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 40))) for _ in range(count)]


def embedder(folder: Path, *modules: tuple[str, dict[str, Any]], family: str = "Bert") -> Path:
    """A small encoder with sentence-transformers' files for these modules."""
    family_model(folder, family, **WIDE)
    steps = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (name, config) in enumerate(modules, 1):
        path = f"{number}_{name}"
        steps.append({"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"})
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return folder


def dense(folder: Path, path: str, inputs: int, outputs: int) -> None:
    """The weights of a dense layer."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    save_file(
        {"linear.weight": torch.randn(outputs, inputs), "linear.bias": torch.randn(outputs)},
        folder / path / "model.safetensors",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that pools the first token, with a dense layer, and scales vectors to length 1."""
    activation = "torch.nn.modules.activation.Tanh"
    layer = {"in_features": 64, "out_features": 12, "bias": True, "activation_function": activation}
    made = embedder(
        tmp_path_factory.mktemp("bert"), ("Pooling", {"pooling_mode": "cls"}), ("Dense", layer), ("Normalize", {})
    )
    dense(made, "2_Dense", 64, 12)
    return made


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[Any]:
    engine = registry.create("embed", folder, engine="vllm", **SMALL)
    yield engine
    engine.close()


def expected(folder: Path, texts: list[str], *, layer: bool = True) -> list[np.ndarray[Any, Any]]:
    """The vectors by plain arithmetic, each text alone."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    with torch.inference_mode():
        for text in texts:
            states = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=64)).last_hidden_state[0]
            vector = states[0] if layer else states.mean(0)
            if layer:
                weights = load_file(folder / "2_Dense" / "model.safetensors")
                vector = torch.tanh(weights["linear.weight"] @ vector + weights["linear.bias"])
                vector = vector / vector.norm()
            vectors.append(vector.numpy())
    return vectors


def run(engine: Any, inputs: list[Any]) -> list[Any]:
    """Outputs and errors, all inputs at once."""
    prepared = engine.prepare(inputs)

    async def main() -> list[Any]:
        async with PassthroughBatcher(engine.infer, max_in_flight=engine.profile.max_in_flight) as batcher:
            good = [item.payload for item in prepared if not isinstance(item, Exception)]
            results = iter([result async for result in batcher.map(good, return_exceptions=True)])
        return [item if isinstance(item, Exception) else next(results) for item in prepared]

    return asyncio.run(main())


def assert_close(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        cosine = float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
        assert cosine >= 0.99999
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_vectors_are_those_of_each_text_alone(embedding: Any, folder: Path) -> None:
    inputs = [*texts(40), "", "wheel " * 300]
    assert_close(run(embedding, inputs), expected(folder, inputs))
    prepared = embedding.prepare(inputs)
    assert [item.cost for item in prepared[-2:]] == [2, 64]
    assert [item.truncated for item in prepared[-2:]] == [False, True]
    assert embedding.profile.dimension == 12


def test_bad_texts_fail_alone(embedding: Any) -> None:
    found = run(embedding, [None, "half \ud800", 7, "fine"])
    assert [type(item) for item in found[:3]] == [RecordError] * 3
    assert found[3].shape == (12,)


def test_a_command_and_a_server_embed(folder: Path, tmp_path: Path) -> None:
    import subprocess

    from openai import OpenAI

    rows = [{"id": str(number), "text": text} for number, text in enumerate(texts(30))]
    rows[3]["text"] = None  # type: ignore[assignment] # a bad record
    source = write(tmp_path / "in.jsonl", rows)
    task = ("--task", "embed", "--engine", "vllm", "--model", str(folder), *FLAGS)
    target = tmp_path / "out.parquet"
    command = [*PROGRAM, "run", *task, "--prompt-name", "query", "-i", str(source), "-o", str(target)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr  # one record has failed
    table = pq.read_table(target)
    good = [row["text"] for row in rows if row["text"]]
    wanted = expected(folder, [PROMPTS["query"] + text for text in good])
    assert_close([np.array(vector) for vector in table["embedding"].to_pylist()], wanted)
    assert (tmp_path / "out.errors.jsonl").read_text().count("\n") == 1

    with server(*task, folder=tmp_path) as (process, url), OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        name = client.models.list().data[0].id
        answer = client.embeddings.create(model=name, input=good)  # as base64, the client's default
        assert_close([np.array(item.embedding) for item in answer.data], expected(folder, good))
        process.send_signal(signal.SIGTERM)  # it ends vLLM's processes
        assert process.wait(60) == 0


def test_labels_and_scores_are_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    names = ("wet", "dry", "so so")
    classifier = family_model(tmp_path / "classifier", "Bert", "ForSequenceClassification", names, **WIDE)
    scorer = family_model(tmp_path / "scorer", "Bert", "ForSequenceClassification", ("x",), **WIDE)
    pairs = list(zip(texts(12), reversed(texts(12)), strict=True))
    for task, folder in (("classify", classifier), ("score", scorer)):
        engine = registry.create(task, folder, engine="vllm", max_model_len=128, **SMALL)
        found = run(engine, [*pairs, ("the wheel", 3)])
        engine.close()
        assert isinstance(found[-1], RecordError)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            for pair, output in zip(pairs, found, strict=False):
                logits = model(**tokenizer(*pair, return_tensors="pt")).logits[0]
                if task == "score":
                    assert output == pytest.approx(float(torch.sigmoid(logits[0])), abs=1e-4)
                else:
                    chances = torch.softmax(logits, -1)
                    assert output["label"] == names[int(chances.argmax())]
                    assert output["score"] == pytest.approx(float(chances.max()), abs=1e-4)


def test_what_vllm_does_not_compute_is_refused_before_it_starts(tmp_path: Path) -> None:
    def refused(folder: Path, words: str, error: type[Exception] = EngineError, **options: Any) -> None:
        with pytest.raises(error, match=words):
            registry.create("embed", folder, engine="vllm", **SMALL, **options)

    refused(
        embedder(tmp_path / "max", ("Pooling", {"pooling_mode": "max"})), "pools by 'max'; with vLLM it must be mean"
    )
    lstm = embedder(tmp_path / "lstm", ("CNN", {}), ("Pooling", {"pooling_mode": "mean"}))
    refused(lstm, "has the module CNN, which vLLM does not compute; use engine torch")
    odd = {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.activation.Softsign"}
    layered = embedder(tmp_path / "odd", ("Pooling", {"pooling_mode": "mean"}), ("Dense", odd))
    refused(layered, "has a dense layer with Softsign, which vLLM does not compute")
    without = embedder(tmp_path / "prompt", ("Pooling", {"pooling_mode": "mean", "include_prompt": False}))
    refused(without, "leaves its prompt out of the pooling", ConfigError)
    narrow = family_model(tmp_path / "narrow", "Bert")
    refused(narrow, "vLLM cannot run the model in .*narrow: it fails at the first text", max_model_len=64)
    plain = embedder(tmp_path / "plain", ("Pooling", {"pooling_mode": "mean"}))
    refused(plain, "runner is set by the task", ConfigError, runner="generate")
    refused(plain, "max_tokens: .*has no such option", ConfigError, max_tokens=3)
    refused(plain, "prompt_name is 'no'", ConfigError, prompt_name="no")
