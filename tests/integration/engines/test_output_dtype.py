"""Quantized vectors of a real model in Parquet, as other libraries read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet
import pytest
from tests.families import family_model

import headrace
from headrace.app.servers.server import ServerSettings, check_settings
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.networks.quantizing import quantized
from headrace.errors import ConfigError, ResumeMismatchError

ROWS = [{"id": number, "text": "the canal feeds the mill " * (1 + number % 5) + str(number)} for number in range(12)]


@pytest.mark.parametrize(("wanted", "length"), [("int8", 20), ("uint8", 20), ("binary", 3), ("ubinary", 3)])
def test_a_parquet_column_is_of_the_type(tmp_path: Path, wanted: Any, length: int) -> None:
    folder = family_model(tmp_path / "model", "Bert")
    options: dict[str, Any] = {"task": "embed", "model": folder, "device": "cpu", "truncate_dim": 20}
    headrace.run(ROWS, sink=tmp_path / "plain.parquet", **options)
    headrace.run(ROWS, sink=tmp_path / "small.parquet", output_dtype=wanted, **options)
    kind = pyarrow.parquet.read_schema(tmp_path / "small.parquet").field("embedding").type
    inner = "uint8" if wanted in ("uint8", "ubinary") else "int8"
    assert (kind.list_size, str(kind.value_type)) == (length, inner)
    exact = np.stack(pandas.read_parquet(tmp_path / "plain.parquet")["embedding"])
    found = pandas.read_parquet(tmp_path / "small.parquet")["embedding"]
    assert found[0].dtype == inner
    np.testing.assert_array_equal(np.stack(found), quantized(exact, wanted))
    with pytest.raises(ResumeMismatchError, match=f"output_dtype was '{wanted}'"):
        headrace.run(ROWS, sink=tmp_path / "small.parquet", **options)


def test_a_server_does_not_take_the_option() -> None:
    with pytest.raises(ConfigError, match="each request to /v1/embeddings may set it"):
        check_settings(ServerSettings(EngineConfig(task="embed", engine_options={"output_dtype": "int8"})))
