"""PyTorch modules of the user's own: rows of numbers and arrays as they are, and what may go wrong in a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import headrace
from headrace.errors import ConfigError, JobError

ROWS = np.random.default_rng(0).standard_normal((700, 16)).astype(np.float32)


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 3))


def wanted(rows: np.ndarray = ROWS) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = net().eval()(torch.from_numpy(rows)).numpy()
        return found


def run(source: object, engine: Any, **settings: Any) -> list[dict[str, Any]]:
    settings = {"max_error_rate": 1.0, **settings}
    rows: list[dict[str, Any]] = headrace.run(source, engine=engine, sink="list", progress=False, **settings)
    return rows


def outputs(rows: list[dict[str, Any]]) -> np.ndarray:
    assert [row["id"] for row in rows] == list(range(len(rows)))
    return np.stack([row["output"] for row in rows])


def same(rows: list[object]) -> list[object]:
    return rows


class Of(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not known where types are checked
    """Calls a function."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> object:
        return self._function(x)


@pytest.mark.parametrize(
    ("source", "column"),
    [
        (ROWS, None),
        (ROWS.astype(np.float64), None),
        (torch.from_numpy(ROWS), None),
        (ROWS.tolist(), None),
        (list(ROWS), None),
        ([{"x": row} for row in ROWS], "x"),
        ([{"x": row.tolist(), "y": "text"} for row in ROWS], "x"),
        (lambda: iter(ROWS), None),
        (pa.table({"x": ROWS.tolist()}), "x"),
    ],
    ids=["array", "float64", "tensor", "lists", "arrays", "dicts", "lists in dicts", "iterator", "table"],
)
def test_rows_of_numbers_go_to_a_module_as_they_are(source: object, column: str | None) -> None:
    np.testing.assert_allclose(outputs(run(source, net(), text_column=column)), wanted(), atol=1e-5)


@pytest.mark.parametrize("kind", ["fixed", "lists"])
def test_columns_of_a_file_go_as_one_tensor(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.reshape(-1)), 16) if kind == "fixed" else ROWS.tolist()
    pq.write_table(pa.table({"id": list(range(len(ROWS))), "x": column}), tmp_path / "in.parquet")
    single = []
    monkeypatch.setattr("headrace.engines.own_modules.as_array", lambda *given: single.append(given))
    rows = run(tmp_path / "in.parquet", net(), text_column="x")
    np.testing.assert_allclose(outputs(rows), wanted(), atol=1e-5)
    assert not single, "no row became a Python object"


def test_a_module_gets_the_columns_that_its_forward_names() -> None:
    class Scaled(torch.nn.Module):  # type: ignore[misc]  # as above
        def forward(self, x: torch.Tensor, factor: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scaled": x * factor[:, None], "sign": x.sum(1).sign().long()}

    rows = run([{"id": f"r{n}", "x": row, "factor": n, "title": "no"} for n, row in enumerate(ROWS)], Scaled())
    np.testing.assert_allclose(rows[7]["output"]["scaled"], ROWS[7] * 7, rtol=1e-6)
    assert [row["output"]["sign"] for row in rows] == np.sign(ROWS.sum(1)).tolist()


def test_preprocess_collate_and_forward_of_an_object_are_used() -> None:
    class Own:
        def __init__(self) -> None:
            self.net = net()

        def preprocess(self, row: dict[str, Any]) -> torch.Tensor:
            return torch.tensor(row["half"]) * 2

        def collate(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.stack(rows), torch.arange(len(rows))

        def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            assert len(batch[0]) == len(batch[1])
            result: torch.Tensor = self.net(batch[0])
            return result

    rows = [{"half": (row / 2).tolist()} for row in ROWS]
    rows[3] = {"other": 1}
    found = run(rows, Own())
    assert found[3]["error"]["reason"] == "KeyError"
    np.testing.assert_allclose(found[4]["output"], wanted()[4], atol=1e-5)


def test_inputs_of_several_shapes_are_run_by_shape() -> None:
    rows = [{"x": row[: 1 + number % 3]} for number, row in enumerate(ROWS)]
    found = run(rows, Of(lambda x: x.sum(1)), text_column="x")
    assert [row["output"] for row in found] == pytest.approx([row["x"].sum() for row in rows], abs=1e-5)


def test_bad_values_cost_their_records_alone() -> None:
    rows: list[dict[str, object]] = [{"x": row} for row in ROWS[:50]]
    rows[3], rows[5], rows[7] = {"x": None}, {"x": ROWS[0][:7]}, {"x": "abc"}
    found = run(rows, net(), text_column="x")
    assert {number: row["error"]["reason"] for number, row in enumerate(found) if "error" in row} == {
        3: "RecordError",
        5: "RuntimeError",
        7: "RecordError",
    }


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x[:3], r"Of returned a tensor of shape \(3, 16\) for a batch of"),
        (lambda x: x.sum(), r"Of returned a tensor of shape \(\) for a batch of"),
        (lambda x: {"a": x, "b": x[:1]}, r"Of returned a tensor of shape \(1, 16\) for a batch of"),
        (lambda x: x.to("meta"), "Of returned a tensor on meta, and runs on cpu"),
        (lambda x: "text", "returned str for batch of"),
        (lambda x: 1 / 0, "division by zero"),
    ],
    ids=["count", "no dimension", "a part", "device", "type", "raises"],
)
def test_what_a_module_does_wrong_is_named(function: Callable[[Any], object], said: str) -> None:
    for row in run(ROWS[:20], Of(function)):
        with pytest.raises(ValueError, match=said):
            raise ValueError(row["error"]["message"])


def test_a_module_may_fill_the_same_tensor_again() -> None:
    buffer = torch.zeros(4096, 16)

    def filled(x: torch.Tensor) -> torch.Tensor:
        buffer[: len(x)] = x
        return buffer[: len(x)]

    np.testing.assert_array_equal(outputs(run(ROWS, Of(filled), batch_size=7)), ROWS)


def test_a_batch_that_does_not_fit_is_split() -> None:
    sizes = []

    def small(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(x) > 10:
            raise torch.OutOfMemoryError("no room")
        return x

    np.testing.assert_array_equal(outputs(run(ROWS, Of(small))), ROWS)
    assert max(sizes) > 10


def test_a_lower_precision_is_used_if_asked_for_and_the_module_stays_as_it_is() -> None:
    own = net()
    found = outputs(run(ROWS, own, dtype="bfloat16"))
    assert 1e-6 < np.abs(found - wanted()).max() < 0.1
    assert next(own.parameters()).dtype == torch.float32


def test_a_job_is_not_continued_with_other_weights(tmp_path: Path) -> None:
    def job(seed: int) -> object:
        return headrace.run(ROWS, engine=net(seed), sink=tmp_path / "out.parquet", progress=False)

    job(0)
    job(0)
    with pytest.raises(headrace.errors.JobError, match="other settings"):
        job(1)


def test_the_batch_grows_while_that_pays() -> None:
    sizes: list[int] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x

    run(np.zeros((30_000, 4), np.float32), Of(noted))
    assert max(sizes) >= 256


def test_a_function_without_a_column_gets_the_whole_row() -> None:
    found = run([{"a": 1, "b": [2]}], lambda rows: [sorted(row) for row in rows])
    assert found == [{"id": 0, "output": ["a", "b"]}]
    assert run([{"text": "t", "b": 1}], same) == [{"id": 0, "output": "t"}]
    assert run([{"text": "t", "b": 1}], same, text_column="*") == [{"id": 0, "output": {"text": "t", "b": 1}}]
    assert isinstance(run(ROWS[:2], same)[1]["output"], np.ndarray)


def test_a_function_gets_a_row_of_the_columns_that_are_named(tmp_path: Path) -> None:
    rows = [{"id": n, "title": f"t{n}", "body": {"text": "b"}, "other": 1} for n in range(2)]

    def joined(given: list[dict[str, object]]) -> list[dict[str, object]]:
        return given

    found = run(rows, joined, text_column="title, body.text")
    assert [one["output"] for one in found] == [{"title": "t0", "body.text": "b"}, {"title": "t1", "body.text": "b"}]
    assert run([{"a,b": 3}], joined, text_column="a,b") == [{"id": 0, "output": 3}]
    with pytest.raises(ConfigError, match="'missing'"):
        run(rows, joined, text_column="title,missing")
    settings: dict[str, Any] = {"source": rows, "sink": tmp_path / "o.jsonl", "engine": joined, "progress": False}
    headrace.run(**settings, text_column="title,other")
    with pytest.raises(JobError, match="text_column"):
        headrace.run(**settings, text_column="title,id")
