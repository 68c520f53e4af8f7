"""Flags of an engine, by its own names."""

from __future__ import annotations

import pytest

from headrace.cli.engine_flags import engine_options
from headrace.errors import ConfigError


def test_flags_become_options_of_the_type_their_value_has() -> None:
    arguments = [
        *("--max-num-seqs", "64", "--gpu-memory-utilization=0.9", "--dtype", "float32", "--enforce-eager"),
        *(
            "--no-enable-prefix-caching",
            "--compilation-config",
            '{"level": 3}',
            "--seed",
            "-1",
            "--stop",
            '["Q:", "\\n"]',
        ),
    ]
    assert engine_options(arguments) == {
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.9,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "compilation_config": {"level": 3},
        "seed": -1,
        "stop": ["Q:", "\n"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float32", "more"], "unexpected argument 'more'"),
        (["-x"], "unexpected argument '-x'"),
        (["--"], "unexpected argument '--'"),
        (["--seed", "1", "--seed=2"], "--seed=2 is given twice"),
    ],
)
def test_what_is_no_flag_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_options(arguments)
