"""What a model's config.json says of its vectors."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engines.networks.heads import matryoshka_dimensions


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        ({}, []),
        ({"is_matryoshka": False}, []),
        ({"is_matryoshka": True}, [1, 2, 3]),
        ({"matryoshka_dimensions": [4, 2, 8, 0]}, [2]),
        ({"is_matryoshka": True, "matryoshka_dimensions": [2]}, [2]),
    ],
)
def test_vectors_are_cut_only_to_what_the_model_was_trained_for(config: dict[str, Any], lengths: list[int]) -> None:
    assert list(matryoshka_dimensions(config, 4)) == lengths
