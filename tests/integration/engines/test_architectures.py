"""docs/architectures.md says what is true of each architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from tests.architectures import ENCODERS, PAGE, embed_row, generate_row
from tests.families import DECODERS

pytestmark = pytest.mark.usefixtures("one_thread")

CONSTRAINTS = Path(__file__).resolve().parents[3] / "requirements" / "constraints.txt"
ROWS = [(embed_row, family) for family in ENCODERS] + [(generate_row, family) for family in DECODERS]
CLASSES = {"Bert", "Roberta", "XLNet", "FNet", "DebertaV2", "ModernBert", "Longformer", "T5", "GPT2", "Nystromformer"}
CLASSES |= {"Canine", "Llama", "Gemma3Text", "Mamba", "Bloom", "Mistral", "Mixtral", "Gemma2", "DeepseekV3", "GptOss"}
CLASSES |= {"Lfm2", "Nemotron", "Rwkv", "Blenderbot"}
"""One of each kind of attention, of positions and of answer on the page."""


@pytest.mark.filterwarnings("default")  # of transformers, at making some of the models
@pytest.mark.parametrize(
    ("row", "family"),
    [
        pytest.param(
            row, family, id=f"{row.__name__}-{family}", marks=() if family in CLASSES else pytest.mark.thorough
        )
        for row, family in ROWS
    ],
)
def test_the_page_has_the_row_that_is_found(tmp_path: Path, row: Callable[[str, Path], str], family: str) -> None:
    found = row(family, tmp_path)
    assert "wrong" not in found
    if f"transformers=={transformers.__version__}\n" in CONSTRAINTS.read_text(encoding="utf-8"):  # it may batch more
        assert found in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_no_other_rows() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) == len(ROWS) + 2  # heads
    assert len(ENCODERS) >= 24 and len(DECODERS) >= 16
