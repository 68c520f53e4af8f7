"""vLLM's own options, as they are known without importing it."""

from __future__ import annotations

import pytest

from headrace.engines.choosing import registry
from headrace.engines.vllm.options import VllmArguments, vllm_arguments
from headrace.errors import UnknownOptionError
from headrace.options import declared


def test_the_typed_options_are_vllm_s() -> None:
    assert set(vllm_arguments() or ()) >= {one.name for one in declared(VllmArguments)}


def test_a_misspelt_option_is_refused_and_a_right_one_is_not() -> None:
    registry.check_options("generate", "vllm", {"max_num_seqs": 8, "temperature": 0.5, "chat": True})
    with pytest.raises(
        UnknownOptionError, match=r"max_num_seqz: .* has no such option; .* more; did you mean max_num_seqs"
    ):
        registry.check_options("generate", "vllm", {"max_num_seqz": 8})
