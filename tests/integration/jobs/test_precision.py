"""`--dtype auto`: a job's dtype is chosen by its own records, and stays the same when it is resumed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.small_models import text_model

import headrace
from headrace.app.jobs import tuning
from headrace.app.jobs.job import JobSettings, execute, rehearse
from headrace.device import precision
from headrace.engines.base import Prepared
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import create
from headrace.engines.networks import pytorch as torch_network
from headrace.engines.networks.base import TextBatch
from headrace.engines.text.embedding import EmbeddingEngine
from headrace.engines.text.options import Embedding
from headrace.errors import ConfigError, MissingExtraError, ResumeMismatchError
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.work import Work
from headrace.jobs.settings import Limits
from headrace.records import Record

WORDS = "the canal feeds a mill and its wheel turns so that water never stands still".split()  # noqa: SIM905
ROWS = [{"id": str(n), "text": " ".join(WORDS[: n % len(WORDS) + 1])} for n in range(60)]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the device is found to compute fast; jobs are long enough to try, and any gain is one."""
    found = {"bfloat16": 4.0}

    def measured(device: object) -> Mapping[str, float]:
        return found

    monkeypatch.setattr(torch_network, "speeds", measured)
    monkeypatch.setattr(torch_network, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(tuning, "WORTH_S", 0.0)
    monkeypatch.setattr(tuning, "LEAST_GAIN", 0.0)
    return found


def vectors(output: Path) -> Any:
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return np.array([row["embedding"] for row in sorted(rows, key=lambda row: int(row["id"]))])


def state(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output.parent / f"{output.name}.parts" / "job.json").read_text())
    return found


def test_the_fastest_numbers_that_pass_are_used_and_said(
    docs: Path, speeds: dict[str, float], encoder_folder: Path, tmp_path: Path
) -> None:
    report = headrace.run(docs, encoder_folder, sink=tmp_path / "auto.jsonl", task="embed", progress=False)
    assert report.precision is not None and report.precision.dtype == "bfloat16"
    assert "times as fast as float32, cosine >= 0.99" in report.precision.detail
    exact = headrace.run(
        docs, encoder_folder, sink=tmp_path / "exact.jsonl", task="embed", progress=False, dtype="float32"
    )
    assert exact.precision is not None and (exact.precision.dtype, exact.precision.detail) == ("float32", "as set")
    auto, plain = vectors(tmp_path / "auto.jsonl"), vectors(tmp_path / "exact.jsonl")
    assert not np.array_equal(auto, plain)
    cosines = (auto * plain).sum(1) / np.linalg.norm(auto, axis=1) / np.linalg.norm(plain, axis=1)
    assert cosines.min() > 0.999
    found, _ = rehearse(JobSettings(docs, tmp_path / "dry.jsonl", EngineConfig("embed", str(encoder_folder))))
    assert found.precision is not None and found.precision.dtype == "bfloat16"
    assert not (tmp_path / "dry.jsonl").exists()


def test_a_device_that_only_emulates_them_keeps_float32(
    docs: Path, speeds: dict[str, float], encoder_folder: Path, tmp_path: Path
) -> None:
    speeds["bfloat16"] = 0.02
    report = headrace.run(docs, encoder_folder, sink=tmp_path / "out.jsonl", task="embed", progress=False)
    assert report.precision is not None and report.precision.dtype == "float32"
    assert report.precision.detail == "bfloat16 is 0.02 times as fast here"


def test_a_short_job_is_not_delayed(
    docs: Path,
    speeds: dict[str, float],
    encoder_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "WORTH_S", 20.0)
    monkeypatch.setattr(tuning, "timed_forward", lambda engine, batch: ([None] * len(batch), len(batch) / 10))  # 6 s
    report = headrace.run(docs, encoder_folder, sink=tmp_path / "out.jsonl", task="embed", progress=False)
    assert report.precision is not None and report.precision.dtype == "float32"
    assert report.precision.detail == "too few records to try bfloat16"
    # Of the same job, a dtype that is hardly faster than float32 saves less than one that is much faster.
    monkeypatch.setattr(tuning, "timed_forward", lambda engine, batch: ([None] * len(batch), float(len(batch))))  # 60 s
    for speed, detail in (
        (1.3, "too few records to try bfloat16"),
        (4.0, "the outputs of bfloat16 cannot be compared"),
    ):
        speeds["bfloat16"] = speed
        report = headrace.run(docs, encoder_folder, sink=tmp_path / f"{speed}.jsonl", task="embed", progress=False)
        assert report.precision is not None and report.precision.detail == detail


def test_a_type_that_gains_too_little_is_not_used_and_the_report_says_why(
    docs: Path,
    speeds: dict[str, float],
    encoder_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "LEAST_GAIN", 1e6)
    report = headrace.run(docs, encoder_folder, sink=tmp_path / "out.jsonl", task="embed", progress=False)
    assert report.precision is not None and report.precision.dtype == "float32"
    assert "times as fast as float32 here, and 1e+06 times is required" in report.precision.detail


def test_nan_in_fewer_bits_falls_back_and_says_so(
    docs: Path,
    speeds: dict[str, float],
    encoder_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = torch_network.TorchNetwork.run_texts

    def overflows(self: torch_network.TorchNetwork, batch: TextBatch, packed: bool) -> Any:
        rows = run(self, batch, packed)
        return rows * np.nan if self.describe()["dtype"] == "bfloat16" else rows

    monkeypatch.setattr(torch_network.TorchNetwork, "run_texts", overflows)
    report = headrace.run(docs, encoder_folder, sink=tmp_path / "out.jsonl", task="embed", progress=False)
    assert report.precision is not None and report.precision.dtype == "float32"
    assert report.precision.detail.startswith("bfloat16 gives NaN or no output for ")
    assert "it runs in float32" in caplog.text
    assert report.ok == len(ROWS)


@pytest.mark.parametrize(("labels", "same"), [(("no", "yes"), True), (("no", "yes"), False)])
def test_labels_must_stay_the_same(
    labels: tuple[str, ...],
    same: bool,
    docs: Path,
    speeds: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = text_model(tmp_path / "model", labels)
    run = torch_network.TorchNetwork.run_texts

    def flips(self: torch_network.TorchNetwork, batch: TextBatch, packed: bool) -> Any:
        rows = run(self, batch, packed)
        return rows if same or self.describe()["dtype"] == "float32" else -rows

    monkeypatch.setattr(torch_network.TorchNetwork, "run_texts", flips)
    report = headrace.run(docs, folder, sink=tmp_path / "out.jsonl", task="classify", progress=False)
    assert report.precision is not None
    assert report.precision.dtype == ("bfloat16" if same else "float32"), report.precision.detail
    assert ("bfloat16 is too far off" in report.precision.detail) is not same
    assert "with the same label" in report.precision.detail


def test_a_sample_of_one_record(docs: Path, speeds: dict[str, float], encoder_folder: Path, tmp_path: Path) -> None:
    docs.write_text(json.dumps(ROWS[7]) + "\n")
    report = headrace.run(docs, encoder_folder, sink=tmp_path / "out.jsonl", task="embed", progress=False)
    assert report.precision is not None and report.precision.dtype == "bfloat16"
    assert report.precision.detail.endswith("on 1 record")


MANY = 2_500
STOP: list[StopRequest] = []
"""Asked when some records are finished, if there is one."""


def finish(row: Any, output: Any) -> Any:
    """A user's own function, which is a moment at which a job can be stopped."""
    while row and STOP:
        STOP.pop().request()
    return output


def in_dtype(settings: JobSettings, dtype: str) -> JobSettings:
    return replace(settings, config=tuning.in_dtype(settings.config, dtype))


def begun_in(docs: Path, folder: Path, output: Path, dtype: str = "bfloat16", **options: Any) -> JobSettings:
    """The settings of a job that was begun in this dtype and stopped."""
    docs.write_text("".join(json.dumps({**ROWS[n % len(ROWS)], "id": str(n)}) + "\n" for n in range(MANY)))
    settings = JobSettings(
        docs,
        output,
        EngineConfig("embed", str(folder), engine_options=options, batch_size=16),
        limits=Limits(part_records=64, workers=1),
        finish=finish,
        worker_kind="thread",
    )
    stop = StopRequest()
    STOP.append(stop)
    end, report = execute(settings, stop, progress=False)
    assert end.state == "interrupted" and 0 < end.records < MANY
    assert report.precision is not None and report.precision.dtype == dtype
    assert state(output)["fingerprint"]["engine"]["dtype"] == dtype
    return settings


def test_a_resumed_job_goes_on_in_the_same_numbers(
    docs: Path, speeds: dict[str, float], encoder_folder: Path, tmp_path: Path
) -> None:
    settings = begun_in(docs, encoder_folder, tmp_path / "out.jsonl")
    speeds["bfloat16"] = 1.0  # no gain here: a new job would run in float32
    end, report = execute(settings, StopRequest(), progress=False)
    assert (end.state, end.records, end.failed) == ("finished", MANY, 0)
    assert report.precision is not None
    assert (report.precision.dtype, report.precision.detail) == ("bfloat16", "as when the job was started")
    assert len(vectors(tmp_path / "out.jsonl")) == MANY
    assert execute(settings, StopRequest(), progress=False)[0].state == "already_finished"


def test_a_resume_where_they_are_only_emulated_says_why_not(
    docs: Path, speeds: dict[str, float], encoder_folder: Path, tmp_path: Path
) -> None:
    settings = begun_in(docs, encoder_folder, tmp_path / "out.jsonl")
    speeds["bfloat16"] = 0.02
    with pytest.raises(ResumeMismatchError) as refused:
        execute(settings, StopRequest(), progress=False)
    for part in (
        "was started in bfloat16",
        "0.02 times the speed",
        'dtype="bfloat16"',
        'dtype="float32", ignore_changes=True',
    ):
        assert part in str(refused.value)
    end, _ = execute(in_dtype(settings, "bfloat16"), StopRequest(), progress=False)
    assert (end.state, end.records) == ("finished", MANY)


def test_the_rest_of_a_job_may_be_computed_in_other_numbers(
    docs: Path, speeds: dict[str, float], encoder_folder: Path, tmp_path: Path
) -> None:
    settings = begun_in(docs, encoder_folder, tmp_path / "out.jsonl")
    exact = in_dtype(settings, "float32")
    with pytest.raises(ResumeMismatchError, match=r"dtype was 'bfloat16', now 'float32'"):
        execute(exact, StopRequest(), progress=False)
    end, _ = execute(replace(exact, ignore_changes=True), StopRequest(), progress=False)
    assert (end.state, end.records) == ("finished", MANY)
    assert state(tmp_path / "out.jsonl")["fingerprint"]["engine"]["dtype"] == "float32"


def test_an_iterator_is_not_read_for_a_sample(speeds: dict[str, float], encoder_folder: Path, tmp_path: Path) -> None:
    report = headrace.run(iter(ROWS), encoder_folder, sink=tmp_path / "out.jsonl", task="embed", progress=False)
    assert report.ok == len(ROWS)
    assert report.precision is not None and report.precision.dtype == "float32"


def test_vectors_are_pooled_and_normalised_in_float32(sentence_folder: Callable[..., Path]) -> None:
    engine = EmbeddingEngine(Embedding(model=sentence_folder(), device="cpu", dtype="bfloat16"))
    payloads = [one.payload for one in engine.prepare([row["text"] for row in ROWS]) if isinstance(one, Prepared)]
    lengths = np.linalg.norm(np.stack(engine.forward(payloads)), axis=1)
    assert np.abs(lengths - 1).max() < 1e-5


def test_numbers_that_the_device_lacks_are_used_if_set_and_said_to_be_slow(
    docs: Path, speeds: dict[str, float], encoder_folder: Path, tmp_path: Path
) -> None:
    speeds["bfloat16"] = 0.13
    report = headrace.run(
        docs, encoder_folder, sink=tmp_path / "out.jsonl", task="embed", progress=False, dtype="bfloat16"
    )
    assert report.precision is not None and report.precision.dtype == "bfloat16"
    assert report.precision.detail == "as set; this device computes it at 0.13 times the speed of float32"


INT8 = importlib.util.find_spec("torchao") is not None


@pytest.mark.skipif(not INT8, reason="torchao is not installed")
@pytest.mark.parametrize("passes", [True, False])
def test_int8_is_used_where_it_passes_and_falls_back_by_name(
    passes: bool,
    docs: Path,
    speeds: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    speeds["bfloat16"] = 0.2
    if not passes:
        monkeypatch.setattr(precision, "LEAST_COSINE", 1.0)
    folder = text_model(tmp_path / "model", head=False, hidden_size=64, initializer_range=0.02)
    output = tmp_path / "out.jsonl"
    report = headrace.run(docs, folder, sink=output, task="embed", progress=False, quantize="int8")
    assert report.precision is not None and report.precision.dtype == ("int8" if passes else "float32")
    assert "cosine >= 0.99" in report.precision.detail
    assert ("--quantize int8 is not used: int8 is too far off" in caplog.text) is not passes
    assert state(output)["fingerprint"]["engine"]["dtype"] == report.precision.dtype
    exact = tmp_path / "exact.jsonl"
    headrace.run(docs, folder, sink=exact, task="embed", progress=False, dtype="float32")
    assert np.array_equal(vectors(output), vectors(exact)) is not passes


@pytest.mark.skipif(not INT8, reason="torchao is not installed")
def test_an_int8_job_is_resumed_in_int8(docs: Path, speeds: dict[str, float], tmp_path: Path) -> None:
    folder = text_model(tmp_path / "model", head=False, hidden_size=64, initializer_range=0.02)
    settings = begun_in(docs, folder, tmp_path / "out.jsonl", "int8", quantize="int8")
    end, report = execute(settings, StopRequest(), progress=False)
    assert (end.state, end.records, end.failed) == ("finished", MANY, 0)
    assert report.precision is not None
    assert (report.precision.dtype, report.precision.detail) == ("int8", "as when the job was started")


def test_int8_without_its_library_or_with_another_type_is_refused(
    encoder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="quantize is int8, and dtype bfloat16: leave one of them out"):
        EmbeddingEngine(Embedding(model=encoder_folder, quantize="int8", dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"quantize is 'int4'.* int8"):
        create("embed", encoder_folder, quantize="int4")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "headrace\[quantize\]"'):
        EmbeddingEngine(Embedding(model=encoder_folder, quantize="int8"))


def test_other_work_on_the_machine_does_not_hide_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [[Work(Record(n, n, {}), {}, n, cost)] for n, cost in enumerate((10, 20, 30, 40, 50))]
    disturbed = {"float32": {4}, "bfloat16": {1, 2, 3, 4}}

    def forward(name: Any, batch: list[Work]) -> tuple[list[None], float]:
        seconds = batch[0].cost * (1.0 if name == "float32" else 0.5)
        return [None], seconds * (3 if batch[0].record.position in disturbed[name] else 1)

    monkeypatch.setattr(tuning, "timed_forward", forward)
    gain, _, _ = tuning._run_both("float32", "bfloat16", batches, 60.0)  # type: ignore[arg-type]
    assert gain == 2.0
