"""The embedding engine gives the vectors sentence-transformers gives, from any thread, in any company."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from headrace.engines.base import BatchEngine, Prepared
from headrace.engines.choosing.registry import create
from headrace.engines.model_folder import find_folder
from headrace.engines.text.embedding import EmbeddingEngine
from headrace.engines.text.options import Embedding
from headrace.errors import ConfigError, EngineDeadError, EngineError, EngineOutOfMemoryError, RecordError

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "the canal feeds the mill wheel so that it never runs dry while naïve 水車 turns"
WORDS = TEXT.split()
MIXED = ["", "a", *(" ".join(WORDS[: 1 + n % len(WORDS)] * (1 + n // 7)) for n in range(30)), "long " * 700]


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddingEngine]:
    engine = EmbeddingEngine(Embedding(device="cpu"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    return SentenceTransformer(str(find_folder(None)), device="cpu", local_files_only=True)


def payloads(engine: EmbeddingEngine, texts: Sequence[str]) -> list[Any]:
    prepared = engine.prepare(texts)
    assert all(isinstance(one, Prepared) for one in prepared)
    return [one.payload for one in prepared if isinstance(one, Prepared)]


def vectors(engine: EmbeddingEngine, texts: Sequence[str], *, size: int = 8) -> NDArray[np.float32]:
    tokens = payloads(engine, texts)
    return np.vstack([engine.forward(tokens[start : start + size]) for start in range(0, len(tokens), size)])


def cosines(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray((left * right).sum(axis=1) / lengths, dtype=np.float32)


def test_same_vectors_as_sentence_transformers(engine: EmbeddingEngine, reference: SentenceTransformer) -> None:
    texts = [*MIXED[::3], MIXED[-1]]
    ours = vectors(engine, texts, size=4)
    assert ours.shape == (len(texts), 384)
    assert ours.dtype == np.float32
    assert cosines(ours, reference.encode(texts)).min() >= 0.9999
    assert np.linalg.norm(ours, axis=1) == pytest.approx(1.0, abs=1e-5)


def test_a_vector_does_not_depend_on_its_company(encoder_folder: Path) -> None:
    engine = EmbeddingEngine(Embedding(model=encoder_folder, device="cpu"))
    assert cosines(vectors(engine, MIXED, size=1), vectors(engine, MIXED, size=len(MIXED))).min() >= 0.9999


def test_cost_is_the_exact_number_of_tokens(engine: EmbeddingEngine, reference: SentenceTransformer) -> None:
    expected = [len(reference.tokenizer(text, truncation=True, max_length=256)["input_ids"]) for text in MIXED]
    prepared = engine.prepare(MIXED)
    assert [one.cost for one in prepared if isinstance(one, Prepared)] == expected
    assert [one.truncated for one in prepared if isinstance(one, Prepared)] == [False] * (len(MIXED) - 1) + [True]


def test_a_bad_input_is_its_own_error_and_no_others(engine: EmbeddingEngine) -> None:
    prepared = engine.prepare(["good", None, 7, "half \ud800", ["list"], ""])
    errors = {index: str(one) for index, one in enumerate(prepared) if isinstance(one, RecordError)}
    assert errors == {
        1: "the input is null, not text",
        2: "the input is of type int, not text",
        3: "the input is not valid Unicode: surrogates not allowed at character 5",
        4: "the input is of type list, not text",
    }
    assert isinstance(prepared[0], Prepared)
    assert isinstance(prepared[5], Prepared)


def test_nothing_in_nothing_out(engine: EmbeddingEngine) -> None:
    assert engine.prepare([]) == []
    assert engine.forward([]) == []


def test_chunks_are_prepared_on_several_threads_while_the_model_runs(engine: EmbeddingEngine) -> None:
    expected = [one.cost for one in engine.prepare(MIXED) if isinstance(one, Prepared)]
    batch = payloads(engine, MIXED[:8])
    with ThreadPoolExecutor(5) as pool:
        forward = pool.submit(engine.forward, batch)
        chunks = list(pool.map(engine.prepare, [MIXED] * 40))
        assert len(forward.result()) == 8
    for chunk in chunks:
        assert [one.cost for one in chunk if isinstance(one, Prepared)] == expected


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "mean"},
        {"pooling": "cls", "dense": True},
        {"pooling": "max"},
        {"pooling": "lasttoken", "decoder": True},
        {"prompts": {"passage": "passage: the "}, "default_prompt_name": "passage"},
        {"prompts": {"passage": "passage: the "}, "default_prompt_name": "passage", "include_prompt": False},
    ],
    ids=["mean", "cls-dense", "max", "last-decoder", "prompt", "prompt-left-out"],
)
def test_pooling_dense_and_prompts_are_those_of_the_folder(
    sentence_folder: Callable[..., Path], options: dict[str, Any]
) -> None:
    folder = sentence_folder(**options)
    texts = MIXED[1:-1]
    expected = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(texts)
    with_engine = EmbeddingEngine(Embedding(model=folder, device="cpu"))
    assert with_engine.profile.dimension == (8 if options.get("dense") else 16)
    assert np.abs(vectors(with_engine, texts) - expected).max() < 1e-5


def test_a_plain_encoder_is_pooled_by_the_mean(encoder_folder: Path) -> None:
    engine = EmbeddingEngine(Embedding(model=encoder_folder, device="cpu"))
    assert engine.profile.max_model_len == 40
    expected = SentenceTransformer(str(encoder_folder), device="cpu", local_files_only=True).encode(MIXED)
    assert np.abs(vectors(engine, MIXED) - expected).max() < 1e-5


def test_truncate_dim_keeps_the_first_components(encoder_folder: Path) -> None:
    whole, short = (
        EmbeddingEngine(Embedding(model=encoder_folder, device="cpu", truncate_dim=dim)) for dim in (None, 5)
    )
    assert np.abs(vectors(short, MIXED) - vectors(whole, MIXED)[:, :5]).max() < 1e-6
    assert short.profile.dimension == 5


def test_a_too_long_text_fails_alone_when_the_user_says_so(encoder_folder: Path) -> None:
    engine = EmbeddingEngine(Embedding(model=encoder_folder, device="cpu", max_model_len=12, on_too_long="error"))
    fits, too_long = engine.prepare(["word " * 10, "word " * 11])
    assert isinstance(fits, Prepared)
    assert fits.cost == 12
    assert isinstance(too_long, RecordError)
    assert "maximum of 12 tokens" in str(too_long)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 2}, "max_model_len is 2; this model takes 3 to 40 tokens"),
        ({"max_model_len": 41}, "max_model_len is 41"),
        ({"truncate_dim": 17}, "truncate_dim is 17; this model's vectors have 16 components"),
        ({"device": "toaster"}, "device 'toaster' is unknown"),
        ({"device": "meta"}, "device 'meta' is unknown; it may be auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "PyTorch sees"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown"),
        ({"on_too_long": "skip"}, "on_too_long is 'skip'"),
        (
            {"max_len": 3},
            "max_len: .* has no such option; known: device, dtype, adapter, enforce_eager, max_model_len, on_too_long",
        ),
    ],
)
def test_a_wrong_parameter_is_named_with_its_value_and_range(
    encoder_folder: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        create("embed", encoder_folder, **{"device": "cpu"} | options)


def test_files_that_are_no_model_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        EmbeddingEngine(Embedding(model=tmp_path, device="cpu"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match="cannot be loaded") as caught:
        EmbeddingEngine(Embedding(model=tmp_path, device="cpu"))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_the_files_do_not_hold_are_not_made_up(encoder_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(encoder_folder, tmp_path / "partial")
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "layer.1." not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=r"holds no weights for encoder\.layer\.1\.attention"):
        create("embed", folder, device="cpu")
    unpooled = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    save_file(unpooled, folder / "model.safetensors", {"format": "pt"})
    create("embed", folder, device="cpu").close()  # no vector comes from that layer


def test_describe_tells_apart_what_changes_a_vector(encoder_folder: Path) -> None:
    plain = EmbeddingEngine(Embedding(model=encoder_folder, device="cpu")).describe()
    assert plain == EmbeddingEngine(Embedding(model=encoder_folder, device="cpu")).describe()
    for options in ({"truncate_dim": 5}, {"max_model_len": 12}, {"dtype": "bfloat16"}, {"on_too_long": "error"}):
        assert EmbeddingEngine(Embedding(model=encoder_folder, device="cpu", **options)).describe() != plain  # type: ignore[arg-type]


def test_loading_and_running_use_no_network(encoder_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"the network was used: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert len(vectors(EmbeddingEngine(Embedding(model=encoder_folder, device="cpu")), ["text"])) == 1


def test_a_full_device_asks_for_a_smaller_batch_and_a_broken_one_is_dead(encoder_folder: Path) -> None:
    """A CPU raises neither, so the model is made to."""
    engine = EmbeddingEngine(Embedding(model=encoder_folder, device="cpu"))
    batch = payloads(engine, ["a text", "another"])

    def fails_with(error: Exception) -> Any:
        def call(features: object) -> None:
            raise error

        return call

    engine.network.call = fails_with(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(EngineOutOfMemoryError, match="no room for 2 texts of up to 4 tokens"):
        engine.forward(batch)
    engine.network.call = fails_with(torch.AcceleratorError("device-side assert"))
    with pytest.raises(EngineDeadError, match="device-side assert"):
        engine.forward(batch)


def test_a_closed_engine_says_so(encoder_folder: Path) -> None:
    engine = EmbeddingEngine(Embedding(model=encoder_folder, device="cpu"))
    batch = payloads(engine, ["a text"])
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.forward(batch)


def test_it_is_a_batch_engine(engine: EmbeddingEngine) -> None:
    as_seam: BatchEngine = engine
    assert as_seam.profile.pads
    assert as_seam.profile.batch_cost == 1_024
    assert as_seam.profile.batch_size >= 1
