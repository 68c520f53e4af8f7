"""Texts that are longer than the model: split, computed in chunks, and joined."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.serving.running import running
from tests.small_models import NLI, text_model

import headrace
from headrace.app.servers.server import ServerSettings
from headrace.engines.base import Chunks
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import create
from headrace.engines.requests.templates import FilledTemplate
from headrace.errors import ConfigError
from headrace.events import BatchDone

WORDS = "the canal feeds a mill and its wheel turns so that water never stands still in 7 ponds".split()  # noqa: SIM905
SPLIT: dict[str, Any] = {"on_too_long": "split", "chunk_overlap": 5, "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("encoder"), head=False)


def texts() -> list[str]:
    some = random.Random(0)
    return [" ".join(some.choices(WORDS, k=count)) for count in (7, 300, 20, 9_000, 126, 127)]


def test_a_long_document_is_in_many_batches_and_has_the_mean_of_its_chunks(encoder: Path, tmp_path: Path) -> None:
    batches: list[int] = []
    rows = [{"id": n, "text": text} for n, text in enumerate(texts())]
    report = headrace.run(
        rows,
        sink=tmp_path / "out.jsonl",
        model=encoder,
        progress=False,
        batch_size=8,
        listeners=[lambda event: batches.append(event.size) if isinstance(event, BatchDone) else None],
        **SPLIT,
    )
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (report.ok, report.failed, report.truncated) == (6, 0, 0)
    assert (report.split, report.chunks) == (3, 3 + 75 + 2)
    assert sum(batches) == 3 + 80
    assert max(batches) <= 8
    engine = create("embed", encoder, **{key: SPLIT[key] for key in ("device", "dtype")})
    ids = engine.tokenize(texts()[1], False)
    chunks = [ids[start : start + 126] for start in range(0, len(ids) - 5, 121)]
    payloads = [np.array([[101, *chunk, 102]], dtype=np.int32) for chunk in chunks]
    mean = np.average(engine.forward(payloads), axis=0, weights=[len(chunk) for chunk in chunks])
    assert found[1]["embedding"] == pytest.approx(mean.tolist(), abs=1e-5)
    engine.close()


@pytest.mark.parametrize("how", ["mean", "max"])
def test_labels_are_joined_by_the_scores_of_the_chunks(folder: Path, tmp_path: Path, how: str) -> None:
    engine = create("classify", folder, top_labels=2, chunk_join=how, **SPLIT)
    [prepared] = engine.prepare([texts()[1]])
    payloads = [part.payload for part in prepared.payload.parts]
    every = [dict(zip(one["labels"], one["scores"], strict=True)) for one in engine.forward(payloads)]
    scores = [[one[label] for one in every] for label in ("no", "yes")]
    expected = np.max(scores, axis=1) if how == "max" else np.average(scores, axis=1, weights=prepared.payload.weights)
    engine.close()
    rows = [{"id": 0, "text": texts()[1]}]
    out = tmp_path / "out.jsonl"
    headrace.run(rows, sink=out, task="classify", model=folder, top_labels=2, chunk_join=how, progress=False, **SPLIT)
    found = json.loads(out.read_text())["classification"]
    assert dict(zip(found["labels"], found["scores"], strict=True)) == pytest.approx(
        dict(zip(("no", "yes"), expected.tolist(), strict=True)), abs=1e-5
    )


def test_a_server_gives_the_vectors_of_a_job(encoder: Path, tmp_path: Path) -> None:
    rows = [{"id": n, "text": text} for n, text in enumerate(texts())]
    headrace.run(rows, sink=tmp_path / "out.jsonl", model=encoder, progress=False, **SPLIT)
    expected = [json.loads(line)["embedding"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    with running(ServerSettings(EngineConfig("embed", str(encoder), engine_options=SPLIT))) as server:
        answer = server.post("/v1/embeddings", {"input": texts()}).json()
    assert "truncated_inputs" not in answer["usage"]
    for entry, vector in zip(answer["data"], expected, strict=True):
        assert entry["embedding"] == pytest.approx(vector, abs=1e-5)


PROMPTS: dict[str, Any] = {"on_too_long": "split", "max_tokens": 8, "max_model_len": 96, "max_num_seqs": 4}


def answer_alone(engine: Any, payload: Any) -> Any:
    """The answer to a prompt that is computed alone, part by part."""
    while isinstance(payload, Chunks):
        payload = payload.join([answer_alone(engine, part) for part in payload.parts], payload.weights)
    if isinstance(payload, dict):
        return payload
    engine.add(7, payload)
    while not (ended := engine.step()):
        pass
    return ended[0][1]


@pytest.mark.parametrize(
    "rule",
    [
        {"reduce_template": "{question}: {answers}=", "chunk_overlap": 6},
        {"chunk_join": "first", "no_answer": "1"},
    ],
)
def test_long_prompts_are_answered_in_chunks_by_a_job_and_by_a_server(rule: dict[str, Any], tmp_path: Path) -> None:
    some = random.Random(1)
    rows = [{"question": "sum", "text": "+".join(some.choices("123456789", k=k))} for k in (3, 60, 4, 41, 90, 300)]
    template, out = "{question}: {text}=", tmp_path / "out.jsonl"
    report = headrace.run(rows, sink=out, task="generate", prompt_template=template, progress=False, **PROMPTS, **rule)
    found = [json.loads(line)["generation"] for line in out.read_text().splitlines()]
    engine = create("generate", **PROMPTS, **rule)
    prepared = engine.prepare([FilledTemplate(template, row) for row in rows])
    assert [one.parts > 0 for one in prepared] == [False, True, False, False, True, True]
    assert (report.ok, report.split, report.chunks) == (6, 3, sum(one.parts for one in prepared))
    assert found == [answer_alone(engine, one.payload) for one in prepared]
    prompt = "+".join("12345678" * 6) + "="
    [plain] = engine.prepare([prompt])
    expected = answer_alone(engine, plain.payload) if "chunk_join" in rule else None
    engine.close()
    if expected is None:
        return
    with running(ServerSettings(EngineConfig("generate", engine_options={**PROMPTS, **rule}))) as server:
        asked = {"prompt": prompt, "model": "arithmetic"}
        answer = server.post("/v1/completions", asked).json()
        assert answer["choices"][0]["text"] == expected["text"]
        assert answer["usage"]["prompt_tokens"] == expected["prompt_tokens"]
        assert json.dumps(expected["text"]) in server.post("/v1/completions", {**asked, "stream": True}).text


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("embed", {"chunk_overlap": 4}, 'set on_too_long="split"'),
        ("embed", {"on_too_long": "split", "chunk_overlap": 126}, "less than the 126 tokens"),
        ("embed", {"on_too_long": "split", "chunk_join": "max"}, "by 'mean'"),
        ("embed", {"on_too_long": "cut"}, "on_too_long is 'cut'; it must be one of truncate, error, split"),
        ("classify", {"on_too_long": "split", "chunk_overlap": -1}, "chunk_overlap"),
        ("zero-shot", {"on_too_long": "split", "labels": "a,b"}, "engines torch and onnx have for the tasks embed"),
    ],
)
def test_what_cannot_be_had_is_refused(
    task: str, options: dict[str, Any], words: str, encoder: Path, tmp_path: Path
) -> None:
    folder = encoder if task == "embed" else text_model(tmp_path / "nli", NLI)
    with pytest.raises(ConfigError, match=words):
        create(task, folder, device="cpu", **options)
