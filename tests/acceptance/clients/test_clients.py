"""The clients that people have, as unchanged programs with their own defaults, against servers that are processes.

`scripts/install-clients` installs them into an environment of their own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from tests.acceptance.clients import table
from tests.acceptance.command import ROOT, start, traced
from tests.acceptance.serving.process import port_of_ours, wait_until_ready
from tests.small_models import text_model

PROGRAMS = Path(__file__).parent / "programs"
CLIENTS = ROOT / ".venv-clients"
TEXTS = ["a mill", "a canal"]
OTHER_NAMES = ("text-embedding-ada-002", "text-embedding-3-small")
"""What Chroma and LangChain, and Haystack, send unless told."""
QUESTION = {"messages": [{"role": "user", "content": "What is 2 plus 3?"}]}

_FOUND = list(CLIENTS.glob("lib/python*/site-packages/llama_index/core/_static/tiktoken_cache"))
VOCABULARY = {"TIKTOKEN_CACHE_DIR": str(_FOUND[0])} if _FOUND else {}
"""Where the server finds OpenAI's tokenizer, which it would download: LlamaIndex ships with it."""
RAN: set[str] = set()
"""Programs that ran to their end."""

pytestmark = pytest.mark.skipif(
    not (CLIENTS / "bin" / "python").exists(), reason="the clients are not installed: run scripts/install-clients"
)
node = pytest.mark.skipif(
    shutil.which("node") is None or not (CLIENTS / "node" / "node_modules").exists(),
    reason="Node's clients are not installed: install Node and npm, then run scripts/install-clients",
)


class Servers(NamedTuple):
    """Their addresses, in the order in which the programs take them."""

    embed: str
    generate: str
    rank: str
    json: str
    classify: str
    grpc: str
    """Serves the vectors over gRPC."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    ranker = text_model(folder / "model", ("relevance",))
    classifier = text_model(folder / "classifier")
    flags = [
        ["--task", "embed", *_names("all-MiniLM-L6-v2", *OTHER_NAMES)],
        ["--task", "generate", "--state-dir", str(folder / "state"), *_names("arithmetic")],
        ["--task", "score", "--model", str(ranker), *_names("ranker")],
        ["--task", "generate", "--engine", "tests.integration.serving.engines:JsonTalker", *_names("json")],
        ["--task", "classify", "--model", str(classifier), *_names("labels")],
    ]
    with contextlib.ExitStack() as stack:  # they load side by side
        *ports, over_grpc = [stack.enter_context(port_of_ours()) for _ in range(len(flags) + 1)]
        addresses = [f"http://127.0.0.1:{port}" for port in ports]
        flags[0] += ["--grpc-port", str(over_grpc)]
        processes = [
            stack.enter_context(traced(start("serve", "--port", str(port), *given, folder=folder, **VOCABULARY)))
            for port, given in zip(ports, flags, strict=True)
        ]
        for process, address in zip(processes, addresses, strict=True):
            wait_until_ready(process, address)
        yield Servers(*addresses, f"grpc://127.0.0.1:{over_grpc}")


def _names(*names: str) -> list[str]:
    return [part for name in names for part in ("--served-model-name", name)]


@pytest.fixture(scope="module")
def expected(servers: Servers) -> dict[str, Any]:
    """The answers to plain requests."""
    data = post(f"{servers.embed}/v1/embeddings", {"input": TEXTS})["data"]
    completed = post(f"{servers.generate}/v1/completions", {"prompt": "Q: 2+3\nA: "})
    chat = post(f"{servers.generate}/v1/chat/completions", QUESTION)
    best = post(f"{servers.rank}/v1/rerank", {"query": "canal", "documents": TEXTS, "top_n": 1})["results"][0]["index"]
    vectors = np.array([entry["embedding"] for entry in data])
    return {
        "vectors": vectors.tolist(),
        "similarities": (vectors @ vectors[0] / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vectors[0])).tolist(),
        "label": post(f"{servers.classify}/classify", {"input": "a mill"})["data"][0]["label"],
        "completed": completed["choices"][0]["text"],
        "answer": chat["choices"][0]["message"]["content"],
        "ranking": [best],
    }


def post(url: str, body: dict[str, Any]) -> Any:
    response = httpx.post(url, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def said(program: str, servers: Servers) -> dict[str, Any]:
    """What a program prints."""
    path = PROGRAMS / program
    command = [str(CLIENTS / "bin" / "python"), str(path)]
    if path.suffix == ".mjs":  # Node looks for packages beside the program
        path = Path(shutil.copy(path, CLIENTS / "node"))
        command = ["node", str(path)]
    done = subprocess.run([*command, *servers], capture_output=True, text=True, check=False, cwd=CLIENTS)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    RAN.add(program)
    return found


def check(found: dict[str, Any], expected: dict[str, Any], **others: str) -> None:
    """Compare what a program has found; `others` are further names of expected values."""
    for name, value in found.items():
        kind = others.get(name, "answer" if name == "streamed" else name)
        if kind in ("vectors", "vector", "similarities"):
            wanted = expected["vectors"][0] if kind == "vector" else expected[kind]
            assert np.abs(np.array(value) - wanted).max() < 1e-5, name
        else:
            assert value == expected[kind], name


def test_openai(servers: Servers, expected: dict[str, Any]) -> None:
    found = said("use_openai.py", servers)
    assert found.pop("choices") == 2
    assert found.pop("models") == ["all-MiniLM-L6-v2", *OTHER_NAMES]
    check(found, expected, responded="answer", responded_in_pieces="answer")


def test_langchain(servers: Servers, expected: dict[str, Any]) -> None:
    check(said("use_langchain.py", servers), expected)


def test_langchain_by_other_apis(servers: Servers, expected: dict[str, Any]) -> None:
    others = {"by_ollama": "answer", "ollama_streamed": "answer"}
    check(said("use_langchain_partners.py", servers), expected, **others)


def test_llama_index(servers: Servers, expected: dict[str, Any]) -> None:
    check(said("use_llama_index.py", servers), expected, tei="vectors")


def test_litellm(servers: Servers, expected: dict[str, Any]) -> None:
    others = dict.fromkeys(("by_anthropic", "by_ollama", "by_cohere"), "answer")
    check(said("use_litellm.py", servers), expected, by_vllm="vectors", answer_by_vllm="answer", **others)


def test_instructor(servers: Servers) -> None:
    assert said("use_instructor.py", servers) == {"total": 5, "in_markdown": 5}


def test_haystack(servers: Servers, expected: dict[str, Any]) -> None:
    check(said("use_haystack.py", servers), expected)


def test_chroma(servers: Servers, expected: dict[str, Any]) -> None:
    found = said("use_chroma.py", servers)
    assert found.pop("nearest") == ["1"]
    check(found, expected)


def test_cohere(servers: Servers, expected: dict[str, Any]) -> None:
    check(said("use_cohere.py", servers), expected, ranking_v1="ranking", vectors_v1="vectors")


def test_anthropic(servers: Servers, expected: dict[str, Any]) -> None:
    found = said("use_anthropic.py", servers)
    assert found.pop("read") == found.pop("counted")
    assert found.pop("reasons") == ["end_turn"] * 2
    assert "arithmetic" in found.pop("refused")
    assert (found.pop("listed"), found.pop("canceled")) == (True, "canceling")
    check(found, expected, final="answer", in_batch="answer")


def test_ollama(servers: Servers, expected: dict[str, Any]) -> None:
    found = said("use_ollama.py", servers)
    assert (found.pop("models"), found.pop("done")) == (["arithmetic"], ["stop"])
    assert "arithmetic" in found.pop("refused")
    check(found, expected, asked="answer")


def test_huggingface_hub(servers: Servers, expected: dict[str, Any]) -> None:
    found = said("use_huggingface_hub.py", servers)
    assert found.pop("tokens") > 0
    check(found, expected, completed_in_pieces="completed")


def test_voyage(servers: Servers, expected: dict[str, Any]) -> None:
    check(said("use_voyage.py", servers), expected)


def test_triton(servers: Servers, expected: dict[str, Any]) -> None:
    check(said("use_triton.py", servers), expected, as_json="vectors", completed_as_json="completed")


@pytest.mark.parametrize("program", ["use_triton_grpc.py", "use_dspy.py", "use_pydantic_ai.py", "use_smolagents.py"])
def test_other_clients(servers: Servers, expected: dict[str, Any], program: str) -> None:
    check(said(program, servers), expected)


def test_llm(servers: Servers, expected: dict[str, Any]) -> None:
    check(said("use_llm.py", servers), expected)


@node
@pytest.mark.parametrize("client", ["anthropic", "cohere", "huggingface", "langchain", "ollama", "openai", "voyage"])
def test_clients_for_node(servers: Servers, expected: dict[str, Any], client: str) -> None:
    check(said(f"use_{client}.mjs", servers), expected)


@node
def test_ai_sdk(servers: Servers, expected: dict[str, Any]) -> None:
    check(said("use_ai.mjs", servers), expected, answer_by_openai="answer", responded="answer")


def test_the_table_is_written(request: pytest.FixtureRequest) -> None:
    if request.session.testsfailed or not RAN.issuperset(one.program for one in table.CLIENTS):
        pytest.skip("not all clients were run")
    wanted = table.page()
    if table.PAGE.read_text() != wanted:
        table.PAGE.write_text(wanted)
        pytest.fail("the table of docs/clients.md was written again: commit it")
