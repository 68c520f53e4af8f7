"""Handlers in the shapes that TorchServe's documentation gives run unchanged, and their batch settings are obeyed."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import headrace
from headrace.app.jobs import job as app_job
from headrace.engines.base import Prepared
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import create
from headrace.errors import BadResultError, ConfigError, EngineError, RecordError
from headrace.events import BatchDone, Event
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.work import Work
from headrace.records import Record

# TorchScript is what TorchServe's users have on disk.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

CLASS = '''
    """A handler class, its methods by their documented names."""
    import json
    import logging
    import os
    import torch
    from ts.torch_handler.base_handler import BaseHandler

    logger = logging.getLogger(__name__)

    class DoublingHandler(BaseHandler):
        def __init__(self):
            super().__init__()
            self._context = None
            self.initialized = False
            self.batches = []

        def initialize(self, context):
            self._context = context
            self.manifest = context.manifest
            properties = context.system_properties
            model_dir = properties.get("model_dir")
            gpu = torch.cuda.is_available() and properties.get("gpu_id") is not None
            self.device = torch.device("cuda:" + str(properties.get("gpu_id")) if gpu else "cpu")
            path = os.path.join(model_dir, self.manifest["model"]["serializedFile"])
            self.model = torch.jit.load(path)
            self.initialized = True

        def preprocess(self, data):
            rows = []
            for row in data:
                value = row.get("data")
                if value is None:
                    value = row.get("body")
                if isinstance(value, (bytes, bytearray)):
                    value = json.loads(value.decode("utf-8"))
                rows.append(value["numbers"] if isinstance(value, dict) else value)
            return torch.tensor(rows, dtype=torch.float32)

        def inference(self, model_input):
            self._context.metrics.add_counter("batches", 1)
            self.batches.append(len(model_input))
            return self.model.forward(model_input)

        def postprocess(self, inference_output):
            return inference_output.tolist()

        def handle(self, data, context):
            model_input = self.preprocess(data)
            model_output = self.inference(model_input)
            return self.postprocess(model_output)
'''
MODULE = '''
    """A handler function: called without data it loads its model."""
    import helper

    model = None

    def handle(data, context):
        global model
        if not data:
            properties = context.system_properties
            model = lambda text: helper.shout(text) + properties["model_dir"][-1:]
            return
        return [model(row["body"].decode()) for row in data]
'''


MODELS = r"""models={\
  "my_handler": {\
    "1.0": {\
      "marName": "double.mar",\
      "batchSize": 3,\
      "maxBatchDelay": 250\
    }\
  }\
}
"""


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    """Handlers put their folders on the path and their names among the modules."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    while _ENGINES:
        _ENGINES.pop().close()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("ts", "helper", "my_handler"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A handler file with its model, as a torch-model-archiver would be given."""

    class Double(torch.nn.Module):
        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return numbers * 2

    torch.jit.save(torch.jit.trace(Double(), torch.ones(1, 2)), tmp_path / "model.pt")
    (tmp_path / "my_handler.py").write_text(dedent(CLASS))
    return tmp_path


def archive(folder: Path, **model: Any) -> Path:
    described = {"modelName": "double", "handler": "my_handler.py", "serializedFile": "model.pt"} | model
    with zipfile.ZipFile(folder / "double.mar", "w") as mar:
        for path in folder.iterdir():
            if path.suffix in (".py", ".pt", ".yaml", ".properties"):
                mar.write(path, path.name)
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": described, "runtime": "python"}))
    return folder / "double.mar"


_ENGINES: list[Any] = []


def serve(model: Path | None = None, **options: Any) -> Any:
    """An engine that is closed when the test ends."""
    _ENGINES.append(create("custom", model, engine="torchserve", **options))
    return _ENGINES[-1]


def outputs(engine: Any, values: list[Any]) -> list[Any]:
    ready = engine.prepare(values)
    assert all(isinstance(one, Prepared) for one in ready)
    return list(engine.forward([one.payload for one in ready]))


def test_a_class_runs_with_its_model(folder: Path) -> None:
    engine = serve(handler=str(folder / "my_handler.py"))
    assert outputs(engine, ["[1, 2]", {"numbers": [3, 4]}, [5, 6], b"[7, 8]"]) == [[2, 4], [6, 8], [10, 12], [14, 16]]
    assert engine.profile.batch_size == 1


def test_a_function_is_called_without_data_first(tmp_path: Path) -> None:
    (tmp_path / "my_handler.py").write_text(dedent(MODULE))
    (tmp_path / "helper.py").write_text("def shout(text):\n    return text.upper() + '!'\n")
    (tmp_path / "model").mkdir()
    engine = create("custom", tmp_path / "model", engine="torchserve", handler=tmp_path / "my_handler.py")
    assert outputs(engine, ["mill", "wheel"]) == ["MILL!l", "WHEEL!l"]
    named = serve(handler=f"{tmp_path / 'my_handler.py'}:handle")
    assert outputs(named, ["mill"])[0].startswith("MILL!")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model-config.yaml", "minWorkers: 1\nbatchSize: 3\nmaxBatchDelay: 250\nhandler:\n  profile: true\n"),
        ("model-config.yaml", "batch_size: 3\nmax_batch_delay: 250\n"),
        (
            "config.properties",
            "# a comment\ninference_address=http://0.0.0.0:8080\nbatch_size=3\nmax_batch_delay=250\n",
        ),
        (
            "config.properties",
            MODELS,
        ),
    ],
    ids=["yaml", "yaml-other-names", "properties", "properties-models"],
)
def test_its_batch_settings_are_read_from_either_file(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    engine = serve(handler=folder / "my_handler.py")
    assert (engine.profile.batch_size, engine.profile.batch_delay_s) == (3, 0.25)
    elsewhere = (folder / name).rename(folder / f"other{Path(name).suffix}")
    chosen = serve(handler=folder / "my_handler.py", config=elsewhere)
    assert chosen.profile.batch_size == 3


def test_an_archive_runs_as_it_is_and_a_job_obeys_its_settings(folder: Path, tmp_path: Path) -> None:
    (folder / "model-config.yaml").write_text("batchSize: 4\nmaxBatchDelay: 20\n")
    text = (folder / "my_handler.py").read_text()
    text = text.replace("inference_output.tolist()", "[row + [self.batches[-1]] for row in inference_output.tolist()]")
    (folder / "my_handler.py").write_text(text)
    mar = archive(folder, configFile="model-config.yaml")
    rows = [{"body": {"numbers": [n, n + 1]}} for n in range(10)] + [{"body": None}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = headrace.run(
        tmp_path / "in.jsonl",
        sink=tmp_path / "out.jsonl",
        task="custom",
        engine="torchserve",
        handler=str(mar),
        text_column="body",
        progress=False,
    )
    written = [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row[:2] for row in written] == [[2.0 * n, 2.0 * n + 2] for n in range(10)]
    assert max(row[2] for row in written) == 4
    assert (report.ok, report.failed) == (10, 1)


def test_a_record_waits_for_company_as_long_as_the_settings_say(folder: Path) -> None:
    """Four are a batch though the delay is an hour; two wait until it is over."""
    assert _formed(folder, 4, "3600000")[0] == [4]
    sizes, took = _formed(folder, 2, "1000")
    assert sizes == [2]
    assert took > 0.9


def _formed(folder: Path, records: int, delay_ms: str) -> tuple[list[int], float]:
    """The sizes of the batches that so many records make, and the seconds until the last has ended."""
    (folder / "model-config.yaml").write_text(f"batchSize: 4\nmaxBatchDelay: {delay_ms}\n")
    engine = serve(handler=folder / "my_handler.py")
    settings = app_job.JobSettings(source=[], sink=folder / "out.jsonl", config=EngineConfig(task="custom"))
    works = [Work(Record(n, n, None), None, one.payload, 1) for n, one in enumerate(engine.prepare([[1, 2]] * records))]
    formed: list[int] = []

    def listener(event: Event) -> None:
        if isinstance(event, BatchDone):
            formed.append(event.size)

    async def run() -> float:
        async with app_job.build_batcher(settings, engine, StopRequest(), listener) as batcher:
            began = time.monotonic()
            await asyncio.gather(*[await batcher.submit(work) for work in works])
            return time.monotonic() - began

    took = asyncio.run(run())
    return formed, took


def test_a_folder_of_an_archive_runs_too(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive(folder)) as mar:
        mar.extractall(tmp_path / "unpacked")
    engine = serve(handler=tmp_path / "unpacked")
    assert outputs(engine, ["[1, 2]"]) == [[2, 4]]


def test_the_base_class_alone_loads_a_torchscript_model(folder: Path) -> None:
    (folder / "my_handler.py").write_text(
        "from ts.torch_handler.base_handler import BaseHandler\n\nclass Plain(BaseHandler):\n    pass\n"
    )
    engine = serve(handler=archive(folder))
    assert outputs(engine, [[1.0, 2.0], [3.0, 4.0]]) == [[2.0, 4.0], [6.0, 8.0]]


def test_the_base_class_loads_weights_into_the_class_of_the_model_file(folder: Path) -> None:
    (folder / "net.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.scale = torch.nn.Parameter(torch.zeros(1))\n\n"
        "    def forward(self, numbers):\n        return numbers * self.scale\n"
    )
    torch.save({"scale": torch.tensor([5.0])}, folder / "model.pt")
    (folder / "my_handler.py").write_text(
        "from ts.torch_handler.base_handler import BaseHandler\n\nclass Plain(BaseHandler):\n    pass\n"
    )
    engine = serve(handler=archive(folder, modelFile="net.py"))
    assert outputs(engine, [[1.0, 2.0]]) == [[5.0, 10.0]]


def test_a_status_of_400_is_that_record_s_error(tmp_path: Path) -> None:
    (tmp_path / "my_handler.py").write_text(
        "def handle(data, context):\n    if data is None:\n        return\n"
        "    if len(data) > 1:\n        context.set_response_status(code=422, phrase='no such mill', idx=1)\n"
        "    return [context.get_request_id(place) for place in range(len(data))]\n"
    )
    engine = serve(handler=tmp_path / "my_handler.py")
    first, refused = outputs(engine, ["a", "b"])
    assert first == "0"
    assert isinstance(refused, RecordError)
    assert str(refused) == "the handler answered 422 no such mill"
    assert outputs(engine, ["c"]) == ["2"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [("'ab'", "returned a str"), ("[1]", "returned 1 results for batch of 2"), ("None", "NoneType")],
)
def test_a_wrong_answer_is_named(tmp_path: Path, answer: str, words: str) -> None:
    (tmp_path / "my_handler.py").write_text(f"def handle(data, context):\n    return {answer}\n")
    engine = serve(handler=tmp_path / "my_handler.py")
    with pytest.raises(BadResultError, match=words):
        outputs(engine, ["a", "b"])


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ("x = 1", ConfigError, "must have a function handle, or one class with a method handle"),
        ("def handle(data, context):\n    1 / 0", EngineError, "cannot be initialized: ZeroDivisionError"),
    ],
)
def test_a_handler_that_cannot_start_says_why(tmp_path: Path, content: str, error: type, words: str) -> None:
    (tmp_path / "my_handler.py").write_text(content)
    with pytest.raises(error, match=words):
        serve(handler=tmp_path / "my_handler.py")


def test_files_that_are_missing_or_damaged_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.mar").write_bytes(b"no zip")
    with zipfile.ZipFile(tmp_path / "empty.mar", "w"):
        pass
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (None, {}, "no handler is set"),
        ("nowhere.py", {}, "no handler file 'nowhere.py'"),
        (tmp_path / "nowhere.mar", {}, "cannot read model archive"),
        (tmp_path / "bad.mar", {}, "cannot read model archive"),
        (tmp_path / "empty.mar", {}, r"holds no usable MAR-INF/MANIFEST\.json"),
        (
            archive(folder, handler="text_classifier"),
            {},
            "TorchServe's built-in handler text_classifier, which is not supported",
        ),
        (folder / "my_handler.py", {"model": tmp_path / "nowhere"}, "is not a folder"),
        (folder / "my_handler.py", {"config": tmp_path / "nowhere.yaml"}, "no handler configuration"),
    ]
    for handler, options, words in cases:
        with pytest.raises(ConfigError, match=words):
            serve(handler=handler, **options)
    for text in ("batchSize: many", "batchSize: -1", "- a list", "a: b: c"):
        (folder / "model-config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"model-config\.yaml"):
            serve(handler=folder / "my_handler.py")
