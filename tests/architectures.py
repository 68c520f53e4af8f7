"""The table of docs/architectures.md: each architecture is right in company, or refused in one line.

python -m tests.architectures      # writes the table anew
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.families import DECODERS, FAMILIES, MORE_ENCODERS, family_model

from headrace.engines.choosing.registry import create
from headrace.errors import EngineError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
ENCODERS = (*FAMILIES, *MORE_ENCODERS)
TEXTS = [
    "the canal",
    "so that it never runs dry in 1987 " * 9,
    "mill",
    "its wheel turns and feeds the canal " * 3,
    "a b c",
    "the mill and its wheel " * 17,
]
_TOKENS = 8
"""Length of each answer."""
_SLOWER = {"equal lengths": ", in batches of equal length", "one at a time": ", one at a time"}
_ENDINGS = {"T5": "EncoderModel", "GPT2": "LMHeadModel"}


def embed_row(family: str, folder: Path) -> str:
    """The row of a model that gives vectors.

    "right": in three batches, each vector is the one that sentence-transformers gives for the text alone.
    """
    ending = "EncoderModel" if family == "T5" else "Model"
    family_model(folder, family, ending)
    try:
        engine = create("embed", folder, device="cpu", max_model_len=200)
    except EngineError as error:
        return f"| {family}{ending} | {_refused(error)} |"
    ready = [one.payload for one in engine.prepare(TEXTS)]
    engine.network.module.max_seq_length = 200
    expected = np.array([engine.network.module.encode(text) for text in TEXTS])
    right = float(np.ptp(expected, axis=0).max()) > 1e-3
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [4, 1]):
        found = np.array(engine.forward([ready[place] for place in order]))
        right = right and np.allclose(found, expected[order], rtol=1e-4, atol=1e-4)
    return f"| {family}{ending} | {'right' if right else 'wrong'}{_SLOWER.get(engine._rows.padding, '')} |"


def generate_row(family: str, folder: Path) -> str:
    """The row of a model that generates, with both engines of transformers.

    "right": in a batch, each greedy answer is the one that transformers' `generate` gives for the prompt alone.
    """
    ending = _ENDINGS.get(family, "ForCausalLM")
    family_model(folder, family, ending)
    found = [_generates(folder, name) for name in ("torch", "static")]
    return f"| {family}{ending} | {' | '.join(found)} |"


def _generates(folder: Path, name: str) -> str:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("headrace")
    log.addHandler(handler)
    try:
        engine = create(
            "generate",
            folder,
            engine=name,
            device="cpu",
            max_tokens=_TOKENS,
            ignore_eos=True,
            max_num_seqs=4,
            max_model_len=200,
        )
    except EngineError as error:
        return _refused(error)
    finally:
        log.removeHandler(handler)
    asks = [one.payload for one in engine.prepare(text[:90] for text in TEXTS)]
    expected = [_alone(engine, ask.prompt) for ask in asks]
    continuous = engine.profile.batching == "steps"
    answers = _in_steps(engine, asks) if continuous else [*engine.forward(asks[:4]), *engine.forward(asks[4:])]
    texts = [answer["text"] if isinstance(answer, dict) else f"failed: {answer}" for answer in answers]
    right = texts == expected and len(set(expected)) > 2
    static = name == "torch" and not continuous
    why = f", in static batches: {_reason(said[0])}" if static else _SLOWER.get(getattr(engine, "_padding", ""), "")
    return f"{'right' if right else 'wrong'}{why}"


def _reason(said: str) -> str:
    return re.sub(r"^this model cannot be batched continuously: ", "", said).partition("; prompts run")[0]


def _in_steps(engine: Any, asks: Sequence[Any]) -> list[Any]:
    answers: dict[int, Any] = {}
    for key, ask in enumerate(asks):
        engine.add(key, ask)
    while len(answers) < len(asks):
        answers.update(engine.step())
    return [answers[key] for key in range(len(asks))]


def _alone(engine: Any, prompt: Sequence[int], tokens: int = _TOKENS) -> str:
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([prompt])
    model = AutoModelForCausalLM.from_pretrained(str(engine._lm._folder))
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return str(engine._lm._tokenizer.decode(found[0, len(prompt) :].tolist(), skip_special_tokens=True))


def _refused(error: EngineError) -> str:
    """The reason, without the folder's name and the way out."""
    reason = re.sub(r"^the model in \S+", "the model", str(error))
    return f"refused: {re.split('; (?:use|choose) ', reason)[0]}"


_BEGIN = "<!-- written by python -m tests.architectures -->\n\n"


def main() -> None:
    """Write the tables."""
    rows: list[tuple[Any, Any, str]] = [(embed_row, ENCODERS, "| `embed` | result |\n|---|---|\n")]
    rows += [(generate_row, DECODERS, "| `generate` | `--engine torch` | `--engine static` |\n|---|---|---|\n")]
    tables = []
    for row, families, head in rows:
        lines = []
        for family in families:
            with tempfile.TemporaryDirectory() as folder:
                lines.append(row(family, Path(folder)))
        tables.append(head + "\n".join(lines) + "\n")
    text = PAGE.read_text(encoding="utf-8").partition(_BEGIN)[0]
    PAGE.write_text(text + _BEGIN + "\n".join(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
