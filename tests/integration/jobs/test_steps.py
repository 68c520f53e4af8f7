"""Jobs of several steps: every record once, each model loaded once, whatever fails or is killed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.integration.jobs.harness import texts, write_rows
from tests.integration.jobs.test_resume import Killed, Reaper

import headrace
from headrace.app.jobs import step_settings
from headrace.app.jobs.job import execute
from headrace.app.jobs.step_settings import Step, parse_steps, read_steps
from headrace.app.jobs.steps import StepsEnd, prepare_steps, rehearse_steps, run_steps
from headrace.cli.signals import Stopper
from headrace.cli.steps import carry_out
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError, OutputLockedError, RecordError, ResumeMismatchError
from headrace.io.formats.parquet import ParquetWriter
from headrace.io.sinks.targets import find_target
from headrace.io.sources.in_memory import SequenceSource
from headrace.io.sources.joined import JoinedSource, StepOutput
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import JobSettings, Limits
from headrace.jobs.state.lock import exclusive
from headrace.observe.reporting.report import Report
from headrace.records import Ok, Record
from headrace.testing import FakeEngine

ROWS = 60


class Models:
    """Engines that record their loads and refuse what `bad` says."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.bad: dict[str, set[int]] = {}

    def refuse(self, model: str, text: str) -> Exception | None:
        return RecordError("not today") if int(text.split()[1]) in self.bad.get(model, ()) else None


@pytest.fixture
def models() -> Models:
    return Models()


def three(models: Models) -> list[Step]:
    def vectors(model: str | None = None) -> FakeEngine:
        models.loads.append("vectors")
        return FakeEngine(model, refuses=functools.partial(models.refuse, "vectors"))

    def label(model: str | None = None) -> Callable[[list[str]], list[dict[str, Any]]]:
        models.loads.append("label")
        return labels

    def labels(batch: list[str]) -> list[dict[str, Any]]:
        for text in batch:
            if error := models.refuse("label", text):
                raise error
        return [{"label": "long" if len(text) > 40 else "short", "score": 0.5} for text in batch]

    def answer(model: str | None = None) -> Callable[[list[str]], list[str]]:
        models.loads.append("answer")
        return lambda prompts: [f"seen {prompt}" for prompt in prompts]

    return parse_steps(
        [
            {"name": "vectors", "task": "embed", "engine": vectors},
            {"name": "label", "engine": label},
            {"name": "answer", "engine": answer, "prompt_template": "{text} is {label.label}"},
        ]
    )


def job(folder: Path, name: str = "out.jsonl", **settings: Any) -> JobSettings:
    source = folder / "in.jsonl"
    if not source.exists():
        write_rows(source, [*texts(30), b"broken", *texts(ROWS - 1)[30:]])
    limits = Limits(part_records=16, max_error_rate=1.0)
    return JobSettings(source, f"{folder}/{name}", limits=limits, keep_columns=("text",), **settings)


def run(settings: JobSettings, steps: list[Step], column: str | None = None) -> StepsEnd:
    one = functools.partial(execute, stop=StopRequest(), progress=False)
    return run_steps(prepare_steps(settings, steps, column), one)


def rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return found
    files = sorted(path.glob("part-*")) if path.is_dir() else [path]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def letters(path: Path) -> dict[int, str]:
    errors = find_target(path).errors
    found = [json.loads(line) for line in errors.read_text().splitlines()] if errors.exists() else []
    return {letter["position"]: letter["message"] for letter in found}


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out/"])
def test_later_steps_see_the_outputs_of_earlier_ones(tmp_path: Path, models: Models, name: str) -> None:
    models.bad = {"vectors": {3}, "label": {8}}
    settings = job(tmp_path, name)
    ended = run(settings, three(models))
    found = {row["id"]: row for row in rows(tmp_path / name)}
    failed = letters(tmp_path / name)
    assert set(failed) == {3, 8, 30}
    assert failed[3] == "step vectors: not today"
    assert failed[8] == "step label: not today"
    assert list(found) == [f"r{n}" for n in range(ROWS - 1) if n not in (3, 8)]
    [alone] = FakeEngine().forward([found["r5"]["text"]])
    assert found["r5"]["vectors"] == pytest.approx(list(alone))
    assert found["r5"]["label"]["score"] == 0.5
    assert found["r5"]["answer"] == f"seen {found['r5']['text']} is {found['r5']['label']['label']}"
    assert models.loads == ["vectors", "label", "answer"]
    assert [(step.name, step.loads, step.records, step.failed) for step in ended.report.steps] == [
        ("vectors", 1, ROWS, 2),
        ("label", 1, ROWS, 3),
        ("answer", 1, ROWS, 3),
    ]
    if name == "out.parquet":
        schema = pq.read_schema(tmp_path / name)
        assert str(schema.field("vectors").type).startswith("fixed_size_list<element: double"), "as without steps"


def test_dead_letters_hold_the_row_as_it_was_read(tmp_path: Path, models: Models) -> None:
    models.bad = {"label": {8}}
    run(job(tmp_path), three(models))
    [letter] = [line for line in (tmp_path / "out.errors.jsonl").read_text().splitlines() if '"r8"' in line]
    assert json.loads(letter)["record"] == texts(9)[8]


def test_killed_at_any_write(tmp_path: Path, models: Models) -> None:
    """A run of all steps, also one that starts again: the next one ends with the same files."""
    models.bad = {"vectors": {3}}
    write_rows(tmp_path / "in.jsonl", [*texts(5), b"broken", *texts(8)[5:]])
    steps = [three(models)[0], three(models)[2]]
    steps[1] = dataclasses.replace(steps[1], prompt_template="{text} is {vectors}")
    run(job(tmp_path, "whole.jsonl"), steps)
    expected = (tmp_path / "whole.jsonl").read_bytes(), (tmp_path / "whole.errors.jsonl").read_bytes()
    moment = 0
    for moment in itertools.count(1):
        with pytest.MonkeyPatch.context() as patch:
            reaper = Reaper(moment, patch)
            try:
                run(job(tmp_path, overwrite=True), steps)
            except Killed:
                pass
        if reaper.left > 0:
            break
        models.loads.clear()
        run(job(tmp_path), steps)
        assert sorted(set(models.loads)) == sorted(models.loads), "no model twice"
        assert ((tmp_path / "out.jsonl").read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes()) == expected
    assert moment > 20


def test_a_stopped_job_continues_in_its_step(tmp_path: Path, models: Models) -> None:
    stop = StopRequest()
    steps = three(models)
    one = functools.partial(execute, stop=stop, progress=False)
    ended = run_steps(
        prepare_steps(job(tmp_path), steps), one, lambda number, _: stop.request() if number == 2 else None
    )
    assert ended.end.state == "interrupted"
    assert [step.name for step in ended.report.steps] == ["vectors", "label"]
    models.loads.clear()
    ended = run(job(tmp_path), steps)
    assert ended.end.state == "finished"
    assert models.loads == ["label", "answer"]
    assert [step.loads for step in ended.report.steps] == [0, 1, 1]


def test_a_step_that_finishes_after_a_stop_is_the_last_one(tmp_path: Path, models: Models) -> None:
    def one(step: JobSettings, stop: StopRequest) -> tuple[JobEnd, Report]:
        ended = execute(step, stop, progress=False)
        stop.request()
        return ended

    assert carry_out(prepare_steps(job(tmp_path), three(models)), Stopper(), one) == 128
    assert models.loads == ["vectors"]


def test_sparse_vectors_of_an_earlier_step_keep_their_types(tmp_path: Path) -> None:
    """As a step writes them and a later one reads them."""
    path = tmp_path / "1.parquet"
    sparse = {"indices": np.array([3, 9], np.int32), "values": np.array([0.5, 2], np.float32)}
    path.write_bytes(ParquetWriter("s").encode([Ok(Record(0, 0, {}), sparse, 1)]))
    output = StepOutput("s", "s", path, tmp_path / "none.jsonl", "parquet")
    [chunk] = JoinedSource(SequenceSource(["a"]), [output], {}, as_answer=False).chunks(lambda at: at)
    found = chunk.records[0].data["s"]
    assert (found["indices"].dtype, found["values"].dtype) == (np.int32, np.float32)
    assert step_settings._format(find_target("x.parquet"), EngineConfig("sparse-embed"), None) == "parquet"


def test_a_finished_job_loads_nothing_and_keeps_no_outputs_of_its_steps(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", texts(20))
    (tmp_path / "out").mkdir()
    steps = [{"name": name, "engine": "headrace.testing:FakeEngine", "task": "embed"} for name in ("a", "b")]

    def again(**more: Any) -> Any:
        return headrace.run(tmp_path / "in.jsonl", sink=tmp_path / "out/x.jsonl", steps=steps, progress=False, **more)

    assert [step.loads for step in again().steps] == [1, 1]
    files = {path.name for path in (tmp_path / "out/x.jsonl.parts/steps").iterdir()}
    assert files == {"1.jsonl.parts", "lock", "steps.json"}, "the output of the first step is gone"
    assert again().steps == ()
    assert again(overwrite=True).ok == 20
    (tmp_path / "out/x.jsonl").unlink()
    assert again().ok == 20
    assert len(rows(tmp_path / "out/x.jsonl")) == 20


def test_retry_runs_only_what_failed(tmp_path: Path, models: Models) -> None:
    models.bad = {"vectors": {3, 4}, "label": {8}}
    run(job(tmp_path), three(models))
    assert set(letters(tmp_path / "out.jsonl")) == {3, 4, 8, 30}
    models.bad = {"vectors": {4}}
    run(job(tmp_path, retry=True), three(models))
    assert set(letters(tmp_path / "out.jsonl")) == {4, 30}
    assert [row["id"] for row in rows(tmp_path / "out.jsonl")] == [f"r{n}" for n in range(ROWS - 1) if n != 4]
    models.bad = {}
    run(job(tmp_path, "whole.jsonl"), three(models))
    run(job(tmp_path, retry=True), three(models))
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_each_record_by_the_model_that_it_names(tmp_path: Path) -> None:
    def one(text: list[str]) -> list[str]:
        return [f"one {value}" for value in text]

    def two(text: list[str]) -> list[str]:
        return [f"two {value}" for value in text]

    names = ["a", "b", "b", "c", None, "a"]
    data = [{"id": n, "text": f"t{n}", "by": name} for n, name in enumerate(names)]
    write_rows(tmp_path / "in.jsonl", [*data[:3], b"broken", *data[3:]])
    steps: list[dict[str, object]] = [{"name": "a", "engine": one}, {"name": "b", "engine": two, "finish": shout}]
    report = headrace.run(
        tmp_path / "in.jsonl",
        sink=tmp_path / "out.jsonl",
        steps=steps,
        model_column="by",
        keep_columns=["by"],
        progress=False,
        limits=Limits(max_error_rate=1.0),
    )
    assert rows(tmp_path / "out.jsonl") == [
        {"id": 0, "by": "a", "output": "one t0"},
        {"id": 1, "by": "b", "output": "TWO T1"},
        {"id": 2, "by": "b", "output": "TWO T2"},
        {"id": 5, "by": "a", "output": "one t5"},
    ]
    failed = letters(tmp_path / "out.jsonl")
    assert failed[4] == "step a: column 'by' is 'c', which is no model of this job: a, b"
    assert set(failed) == {3, 4, 5}
    assert report.failed == 3


def shout(row: dict[str, Any], output: str) -> str:
    return output.upper()


def test_selected_rows_keep_their_ids(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [{"text": f"text {n}"} for n in range(40)])
    steps = [{"name": name, "engine": "headrace.testing:FakeEngine", "task": "embed"} for name in ("a", "b")]
    headrace.run(tmp_path / "in.jsonl", sink=tmp_path / "o.jsonl", steps=steps, shard=(1, 3), limit=5, progress=False)
    found = rows(tmp_path / "o.jsonl")
    assert [row["id"] for row in found] == [1, 4, 7, 10, 13]
    assert all(row["a"] == row["b"] == list(FakeEngine().forward([f"text {row['id']}"])[0]) for row in found)


def test_the_estimate_of_a_step_that_needs_no_other(tmp_path: Path, models: Models) -> None:
    found = list(rehearse_steps(prepare_steps(job(tmp_path), three(models))))
    assert [(name, estimate is None) for name, estimate in found] == [
        ("vectors", False),
        ("label", False),
        ("answer", True),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"], "nothing is written"


def settings_changes() -> Iterator[tuple[str, Callable[[list[Step]], list[Step]], str]]:
    yield "order", lambda steps: [steps[1], steps[0]], "the step's name was 'vectors', now 'label'"
    yield "fewer", lambda steps: steps[:1], "the step's name was 'label', now 'vectors'"
    yield "model", lambda steps: [parse_steps([{"name": "vectors", "engine": "headrace.testing:FakeEngine",
                                                "engine_options": {"dimension": 3}, "task": "embed"}])[0],
                                  steps[1]], "the engine's dimension was 8, now 3"  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [(change, words) for _, change, words in settings_changes()])
def test_other_steps_are_refused_by_name(
    tmp_path: Path, models: Models, change: Callable[[list[Step]], list[Step]], words: str
) -> None:
    steps = three(models)[:2]
    run(job(tmp_path), steps)
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(ResumeMismatchError, match=words):
        run(job(tmp_path), change(steps))
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_one_process_at_a_time(tmp_path: Path, models: Models) -> None:
    run(job(tmp_path), three(models)[:2])
    lock = tmp_path / "out.jsonl.parts/steps/lock"
    with exclusive(lock, tmp_path / "out.jsonl"), pytest.raises(OutputLockedError, match=r"out\.jsonl is being"):
        run(job(tmp_path), three(models)[:2])
    assert models.loads == ["vectors", "label"]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "at least one step"),
        ("embed", "must be a list"),
        (["embed"], "step 1 is of type str"),
        ([{"nme": "a"}], "'nme' is unknown; did you mean name?"),
        ([{"dtype": "float32"}], "'dtype' is unknown; it is an option of an engine: put it under engine_options"),
        ([{"name": 3}], "name is 3; it must be a text"),
        ([{"name": "id"}], "cannot be named 'id'"),
        ([{"name": "a"}, {"name": "a"}], "two steps are named 'a'"),
        ([{"name": "text"}, {"name": "b"}], "step 'text': the input has a column of this name"),
        ([{"name": "a", "prompt_template": "{b}"}, {"name": "b"}], "step 'a': .* has a column 'b'"),
        ([{"name": "a", "task": "embd"}], "step 'a': unknown task 'embd'"),
        ([{"name": "a"}, {"name": "b", "model": "/nowhere"}], "step 'b': .*/nowhere"),
        ([{"name": "a"}, {"name": "b", "text_column": "label"}], "step 'b': .* has a column 'label'"),
    ],
)
def test_steps_that_cannot_be_run_are_refused_before_anything_is_written(
    tmp_path: Path, steps: Any, words: str
) -> None:
    settings = job(tmp_path)
    with pytest.raises(ConfigError, match=words):
        run(settings, parse_steps(steps))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_what_cannot_be_used_with_steps_is_refused_by_name(tmp_path: Path) -> None:
    steps: list[dict[str, object]] = [{"name": "a"}, {"name": "b"}]
    source, sink = write_rows(tmp_path / "in.jsonl", texts(3)), tmp_path / "out.jsonl"
    for more, words in (
        ({"model": "m"}, "model is a setting of one step"),
        ({"text_column": "t"}, "text_column is a setting of one step"),
        ({"prepare": print}, "prepare cannot be used"),
        ({"order": "prefix"}, "leave order out"),
    ):
        with pytest.raises(ConfigError, match=words):
            headrace.run(source, sink=sink, steps=steps, progress=False, **more)
    with pytest.raises(ConfigError, match="needs a file or folder"):
        headrace.run(source, sink=print, steps=steps, progress=False)
    with pytest.raises(ConfigError, match="can be read once"):
        headrace.run(iter(texts(3)), sink=sink, steps=steps, progress=False)
    with pytest.raises(ConfigError, match="needs steps"):
        headrace.run(source, sink=sink, model_column="text", progress=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "is not YAML"),
        ("a: &a [*a]", 'must be a mapping with "steps"'),
        ("stepps: []", "must be a mapping with \"steps\", a list; 'stepps' is unknown; did you mean steps"),
        ("steps:\n  a: b: c", "steps.yaml is not YAML: line 2: mapping values are not allowed here: a: b: c"),
        ("steps: [{task: embed}]\nmodel: b", "'model' is unknown"),
        ("steps: [{task: embed}]\nmodel_column: 3", "model_column is 3"),
        ("steps: !!python/object/apply:os.system [ls]", "is not YAML"),
        ("\0", "is not YAML"),
    ],
)
def test_a_hostile_file_of_steps(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "steps.yaml").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_steps(tmp_path / "steps.yaml")


def test_a_file_of_steps_may_be_json(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text('{"steps": [{"name": "a", "engine_options": {"labels": ["x"]}}]}')
    assert read_steps(tmp_path / "steps.json") == (
        [Step(name="a", config=EngineConfig(engine_options={"labels": ["x"]}))],
        None,
    )


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_integer_vectors_of_a_step_keep_their_type(tmp_path: Path, kind: str) -> None:
    class Integers(FakeEngine):
        def forward(self, batch: list[str]) -> list[Any]:
            return [(np.asarray(vector) * 100).astype(kind) for vector in super().forward(batch)]

    plain: Any = "headrace.testing:FakeEngine"
    steps = [{"name": "bits", "task": "embed", "engine": Integers}, {"name": "last", "engine": plain}]
    headrace.run(texts(3), sink=tmp_path / "out.parquet", steps=steps, progress=False)
    column = pq.read_table(tmp_path / "out.parquet")["bits"]
    assert str(column.type) == f"fixed_size_list<element: {kind}>[8]"
    assert column[2].as_py() == (np.asarray(FakeEngine().vector(texts(3)[2]["text"])) * 100).astype(kind).tolist()
