"""What can be known before a model is loaded is said before, and the words of a mistake name the way out."""

from __future__ import annotations

import datetime
import decimal
import signal
from pathlib import Path

import pytest
from tests.acceptance.command import FAKE, end, headrace, start

import headrace as package
from headrace.errors import ConfigError, UnknownOptionError
from headrace.jobs.planning import forecast

NO_TORCH = """
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "sentence_transformers", "onnxruntime", "vllm"):
            raise SystemExit(f"{name} was imported")


sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {n}, "text": "t{n}"}}\n' for n in range(20)))
    return tmp_path


def without_torch(*arguments: str, folder: Path) -> tuple[int, str]:
    """Run where whatever loads a model is an end with status 1."""
    return headrace(*arguments, folder=folder, imported="light", before=NO_TORCH, COLUMNS="200")


RUN = ("run", "-i", "in.jsonl", "-o", "out.jsonl")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--modle", "x"), "did you mean --model?"),
        (("--batch_size", "4"), "did you mean --batch-size?"),
        (("--max-model-length", "4"), "did you mean --max-model-len?"),
        (("--truncat-dim", "4"), "did you mean --truncate-dim?"),
        (("--task", "generate", "--temprature", "1"), "did you mean --temperature?"),
        (("--task", "generate", "--engine", "static", "--max-tokns", "1"), "did you mean --max-tokens"),
        (("--engine", "onnx", "--model", ".", "--dtype", "x"), "--dtype: task 'embed' has no such option"),
        (("--model", "nowhere"), "model 'nowhere': no such folder"),
        (("--model", "in.jsonl"), "model 'in.jsonl' is a file"),
        (("--task", "classify"), "--model FOLDER or org/name, or docstrings, which is included"),
        (("--task", "image-classify"), "or digits, which is included"),
        (("--text_colum", "x"), "known: --device, --dtype, "),
        (("--id-colum", "x"), ", and those of --help; did you mean --id-column"),
        (("--task", "shout"), "unknown task 'shout'; known: embed"),
        (("--task", "classify", "--model", "."), "holds no config.json"),
        (("--engine", "tensorrt"), "task 'embed' has no engine 'tensorrt'; known: torch, onnx"),
        (("--task", "rerank"), "use 'score', with the second text in --text-pair-column"),
        (("--task", "Summarize"), "use 'generate' with an instruction in --prompt-template"),
        (("--task", "ner"), "--task custom --engine module:function"),
        (("--task", "embedding"), "use 'embed'"),
        (("--task", "emed"), "did you mean embed?"),
        (("--dtype", "float99"), "--dtype 'float99' is unknown; it may be auto, float32, float16, bfloat16"),
        (("--device", "gpu"), "--device 'gpu' is unknown; it may be auto, cpu, cuda or cuda:N"),
        (("--task", "generate", "--dtype", "half"), "--dtype 'half' is unknown"),
        (("--handler", "x.py", "--device", "mps"), "--device 'mps' is unknown"),
        (("--quantize", "int4"), "--quantize is 'int4'; it must be one of int8"),
        (("--handler", "x.py", "--endpoint", "a"), "--endpoint and --handler choose different engines: give one"),
        (("stray.jsonl",), "did you mean -i stray.jsonl?"),
        (("--keep-columns", "nothing"), "has a column 'nothing'; they have"),
        (("--keep-columns", "nothing"), "; name yours with --keep-columns"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_told_before_anything_is_loaded(folder: Path, flags: tuple[str, ...], said: str) -> None:
    status, output = without_torch(*RUN, *flags, folder=folder)
    assert status == 2, output
    assert said in " ".join(output.replace("│", " ").split()), output
    assert "loading" not in output


def test_a_command_that_there_is_not(folder: Path) -> None:
    for word, said in (("lst", "No such command 'lst'; did you mean list?"), ("zzz", "No such command 'zzz'.")):
        status, output = without_torch(word, folder=folder)
        assert (status, said in output) == (2, True), output


def test_a_handler_beside_an_engine_of_the_users_own(folder: Path) -> None:
    """Which might take a handler itself: only its load can tell."""
    status, output = headrace(*RUN, *FAKE[:2], "--handler", "x.py", folder=folder, imported="light")
    assert (status, "--engine and --handler choose different engines: give one of them" in output) == (2, True)


def test_what_has_changed_since_a_job_was_begun_is_told_before_anything_is_loaded(folder: Path) -> None:
    """Of a job that is not finished: its settings and its input, but nothing of its model."""
    first = ("run", *FAKE, "-i", "in.jsonl", "-o", "out.jsonl", "--text-column", "id", "--max-errors", "0")
    assert headrace(*first, folder=folder, imported="light")[0] == 1, "an id is no text: it stops"
    changed = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--limit", "3")
    status, output = without_torch(*changed, folder=folder)
    assert status == 2, output
    assert "was started with other settings: --limit was not set, now 3; --text-column was 'id', now 'text'" in output
    status, output = without_torch(*changed, "--text-column", "id", "--overwrite", folder=folder)
    assert (status, "was imported" in output) == (1, True), "what starts again has nothing to compare"


def test_an_input_without_its_flag(folder: Path) -> None:
    for arguments in (("run", "in.jsonl"), ("run", "in.jsonl", "-o", "out.jsonl")):
        status, output = without_torch(*arguments, folder=folder)
        assert (status, output.count("\n")) == (2, 1)
        assert "did you mean headrace run -i in.jsonl" in output


def test_a_folder_of_images_names_the_tasks_of_images(folder: Path) -> None:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(b"")
    status, output = without_torch("run", "-i", "pictures", "-o", "out.jsonl", folder=folder)
    assert (status, "for images take --task image-embed or --task image-classify" in output) == (2, True)


@pytest.mark.parametrize(
    ("type_", "name"), [("decimal128(9, 2)", "Decimal"), ("binary()", "bytes"), ("duration('s')", "timedelta")]
)
def test_a_kept_column_that_json_cannot_hold(folder: Path, type_: str, name: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")

    kind = eval(f"pa.{type_}")
    value = {"Decimal": decimal.Decimal("1.50"), "bytes": b"x", "timedelta": datetime.timedelta(seconds=1)}[name]
    pq.write_table(pa.table({"text": ["a"], "v": pa.array([value], kind)}), folder / "in.parquet")
    flags = ("run", "-i", "in.parquet", "--keep-columns", "v")
    status, output = without_torch(*flags, "-o", "out.jsonl", folder=folder)
    said = f"cannot keep column 'v': a text file cannot hold its values, of type {name}"
    assert (status, said in output) == (2, True)
    assert headrace(*flags, "-o", "out.parquet", *FAKE, folder=folder)[0] == 0


def test_all_kept_columns_that_an_output_cannot_hold_are_named_at_once(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")

    columns = {name: pa.array([b"x"]) for name in ("v", "w", "x")}
    pq.write_table(pa.table({"text": ["a"], **columns}), folder / "in.parquet")
    status, output = without_torch("run", "-i", "in.parquet", "--keep-columns", "*", "-o", "out.jsonl", folder=folder)
    assert (status, "cannot keep column 'v': " in output, "; nor can it keep 'w', 'x'" in output) == (2, True, True)


@pytest.mark.timeout(400)  # a real model is loaded once
def test_a_finished_job_is_told_without_torch(folder: Path) -> None:
    flags = ("--max-model-len", "64")
    status, output = end(start(*RUN, *flags, folder=folder), 300)
    assert status == 0, output
    assert "headrace: loading the default model for embed ..." in output
    assert without_torch(*RUN, *flags, folder=folder) == (
        0,
        "headrace: out.jsonl is already finished: 20 records; nothing to do\n",
    )
    report = package.run(folder / "in.jsonl", sink=folder / "out.jsonl", max_model_len=64, progress=False)
    assert (report.state, report.ok, report.skipped) == ("finished", 0, 20)
    (folder / "in.jsonl").write_text('{"id": 1, "text": "other"}\n')
    status, output = without_torch(*RUN, *flags, folder=folder)
    assert (status, "the content of the input has changed" in output) == (2, True)
    (folder / "in.jsonl").write_text("".join(f'{{"id": {n}, "text": "t{n}"}}\n' for n in range(20)))
    status, output = without_torch(*RUN, folder=folder)
    loading = "headrace: loading the default model for embed ...\n"
    assert (status, output) == (2, f"{loading}headrace: the engine cannot be loaded: SystemExit: torch was imported\n")
    (folder / "out.jsonl").unlink()
    assert without_torch(*RUN, *flags, folder=folder)[0] == 2, "a result that was taken away is made anew"


def test_a_finished_job_needs_no_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"task": "embed", "engine": "headrace.testing:FakeEngine", "progress": False, "sink": folder / "out.jsonl"}
    assert package.run(folder / "in.jsonl", **given).ok == 20
    monkeypatch.setattr(forecast, "free_bytes", lambda place: 10)
    assert package.run(folder / "in.jsonl", **given).skipped == 20
    with pytest.raises(ConfigError, match=r"its disk has 0.0 MB left"):
        package.run(folder / "in.jsonl", **given | {"sink": folder / "another.jsonl"})


def test_other_flags_on_a_resume_are_named(folder: Path) -> None:
    assert headrace(*RUN, "--limit", "3", *FAKE, folder=folder)[0] == 0
    status, output = headrace(*RUN, "--limit", "5", *FAKE, folder=folder)
    assert (status, "--limit was 3, now 5" in output) == (2, True)


def test_a_first_line_comes_before_the_engine(folder: Path) -> None:
    (folder / "slow.py").write_text("import time\ntime.sleep(50)\n")
    process = start(*RUN, "--task", "embed", "--engine", "slow:Engine", folder=folder)
    assert process.stderr is not None
    assert process.stderr.readline() == "headrace: loading slow:Engine for embed ...\n"
    process.send_signal(signal.SIGINT)
    assert end(process)[0] == 130


def test_a_server_says_where_it_is(folder: Path) -> None:
    process = start("serve", "--port", "0", "--task", "embed", "--engine", "headrace.testing:FakeEngine", folder=folder)
    assert process.stderr is not None
    lines = [process.stderr.readline()]
    while lines[-1] and "ready at" not in lines[-1]:
        lines.append(process.stderr.readline())
    assert lines[0] == "headrace: loading headrace.testing:FakeEngine to serve embed ...\n"
    address, routes = lines[-1].removeprefix("headrace: ready at ").strip().split(": ", 1)
    assert int(address.rpartition(":")[2]) > 0
    assert {"/v1/embeddings", "/health", "/metrics"} <= set(routes.split(", "))
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 0
    for flags in (("--model", "nowhere"), ("--task", "rerank")):
        status, output = without_torch("serve", *flags, folder=folder)
        assert (status, output.count("\n")) == (2, 1)


def test_known_options_come_with_the_error(folder: Path) -> None:
    with pytest.raises(UnknownOptionError) as raised:
        package.run(folder / "in.jsonl", sink=folder / "out.jsonl", max_model_length=7)
    assert "max_model_len" in raised.value.known


def test_a_forecast_shows_a_record_that_no_terminal_can(folder: Path) -> None:
    (folder / "in.jsonl").write_text('{"text": "x\\ud800", "k": 1}\n{"text": "y", "k": "\\udfff"}\n')
    (folder / "upper.py").write_text("def engine(values):\n    return [value.upper() for value in values]\n")
    chosen = ("--task", "custom", "--engine", "upper:engine", "--keep-columns", "k", "--dry-run")
    status, output = headrace(*RUN, *chosen, folder=folder)
    assert status == 0, output
    assert "x\\ud800" in output


def test_a_finished_job_with_failures_ends_with_the_same_status_each_time(folder: Path) -> None:
    with (folder / "in.jsonl").open("a") as file:
        file.write("no json\n")
    for said in ("wrote out.jsonl: 20 of 21 records, 1 failed", "is already finished: 21 records, 1 failed"):
        status, output = headrace(*RUN, *FAKE, folder=folder)
        assert status == 3
        assert said in output
