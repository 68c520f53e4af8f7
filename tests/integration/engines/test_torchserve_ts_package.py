"""Handlers in the shapes of TorchServe's examples run where it is not installed, within the limits they configure."""

from __future__ import annotations

import io
import json
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import headrace
from headrace.engines.choosing.registry import create
from headrace.errors import ConfigError, EngineDeadError, EngineError, RecordError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

NET = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(1))

        def forward(self, numbers):
            return numbers * self.scale
"""
PLAIN = """
    from ts.torch_handler.base_handler import BaseHandler

    class Plain(BaseHandler):
        pass
"""
DIGITS = """
    import logging
    from ts.context import Context
    from ts.handler_utils.timer import timed
    from ts.metrics.dimension import Dimension
    from ts.metrics.metric_type_enum import MetricTypes
    from ts.torch_handler.image_classifier import ImageClassifier

    logger = logging.getLogger(__name__)

    class Digits(ImageClassifier):
        def initialize(self, context: Context):
            super().initialize(context)
            self.set_max_result_classes(2)
            self.asked = context.metrics.add_metric_to_cache(
                metric_name="Asked", unit="count", dimension_names=[], metric_type=MetricTypes.COUNTER
            )

        @timed
        def preprocess(self, data):
            self.asked.add_or_update(value=len(data), dimension_values=[])
            metrics = self.context.metrics
            metrics.get_metric(metric_name="Size", metric_type=MetricTypes.GAUGE).add_or_update(7, ["a"])
            metrics.add_time(
                name="Took", value=1.5, idx=None, unit="ms", dimensions=[Dimension(name="Method", value="preprocess")]
            )
            metrics.add_size("Bytes", 12, None, "kB")
            metrics.add_percent("Half", 50)
            metrics.add_error("Bad", 0)
            return super().preprocess(data)

        def postprocess(self, data):
            same = self.context.metrics.get_metric("Asked") is self.asked
            timed = self.context.metrics.get_metric("ts_handler_preprocess", MetricTypes.GAUGE).value > 0
            return [[self.asked.value, same, timed, row] for row in super().postprocess(data)]
"""


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("ts", "model", "my_handler"):
            del sys.modules[name]


def write(folder: Path, handler: str, **files: str) -> Path:
    (folder / "my_handler.py").write_text(dedent(handler))
    for name, text in files.items():
        (folder / f"{name}.py").write_text(dedent(text))
    return folder / "my_handler.py"


def outputs(handler: Path | str, values: list[Any], model: Path | None = None) -> list[Any]:
    engine = create("custom", model, engine="torchserve", handler=handler, device="cpu")
    batch = [one.payload for one in engine.prepare(values)]
    try:
        with ThreadPoolExecutor(1) as batcher:  # which calls it on a thread of its own
            return list(batcher.submit(engine.forward, batch).result())
    finally:
        engine.close()


def save_classifier(folder: Path) -> None:
    """A TorchScript model that gives class n the mean of the n-th channel."""

    class Channels(torch.nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels.mean(dim=(2, 3))

    torch.jit.save(torch.jit.trace(Channels(), torch.ones(1, 3, 4, 4)), folder / "model.pt")
    (folder / "index_to_name.json").write_text('{"0": "red", "1": ["x", "green"], "2": "blue"}')


def png(color: tuple[int, int, int], size: tuple[int, int] = (300, 260)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def test_a_bare_handler_loads_a_state_dict_into_the_class_of_model_py(tmp_path: Path) -> None:
    handler = write(tmp_path, PLAIN, model=NET)
    torch.save({"scale": torch.tensor([5.0])}, tmp_path / "net.pt")
    assert outputs(handler, [[1.0, 2.0]]) == [[5.0, 10.0]]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert outputs(write(elsewhere, PLAIN), [[1.0]], tmp_path) == [[5.0]]


def test_weights_without_their_class_are_named(tmp_path: Path) -> None:
    torch.save({"scale": torch.tensor([5.0])}, tmp_path / "net.pt")
    with pytest.raises(EngineError, match=r"net\.pt is not a TorchScript model; define the model's class in model\.py"):
        outputs(write(tmp_path, PLAIN), [[1.0]])
    with pytest.raises(EngineError, match=r"model\.py must have one class that is a torch\.nn\.Module; it has 0"):
        outputs(write(tmp_path, PLAIN, model="x = 1"), [[1.0]])


def test_an_image_classifier_with_metrics_and_labels_runs_in_a_job(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    handler = write(tmp_path, DIGITS)
    (tmp_path / "model-config.yaml").write_text("batchSize: 3\nmaxBatchDelay: 20\nhandler:\n  profile: true\n")
    images = [png((255, 0, 0)), png((0, 0, 255), (30, 70)), b"no image", png((0, 255, 0))]
    pq.write_table(pa.table({"image": images}), tmp_path / "in.parquet")
    report = headrace.run(
        tmp_path / "in.parquet",
        sink=tmp_path / "out.jsonl",
        task="custom",
        engine="torchserve",
        handler=str(handler),
        text_column="image",
        progress=False,
    )
    assert (report.ok, report.failed) == (3, 1)
    written = [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [next(iter(row[3])) for row in written] == ["red", "blue", "green"]
    assert all(row[1] is True and row[2] is True and len(row[3]) == 2 for row in written)
    assert max(row[0] for row in written) >= 4


def test_an_archive_with_torchserve_s_own_image_classifier_runs(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    described = {"modelName": "m", "handler": "image_classifier", "serializedFile": "model.pt"}
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as mar:
        mar.write(tmp_path / "model.pt", "model.pt")
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": described}))
        mar.write(tmp_path / "index_to_name.json", "index_to_name.json")
    (answer,) = outputs(tmp_path / "m.mar", [png((0, 255, 0))])
    assert next(iter(answer)) == "green"
    assert sum(answer.values()) == pytest.approx(1)
    assert outputs("image_classifier", [png((0, 255, 0))], tmp_path) == [answer]


def test_parts_that_are_sent_before_the_end_belong_to_the_answer(tmp_path: Path) -> None:
    handler = write(
        tmp_path,
        """
        from ts.handler_utils.utils import import_class, send_intermediate_predict_response

        def handle(data, context):
            if data is None:
                assert import_class("json.JSONDecodeError").__name__ == "JSONDecodeError"
                return
            for word in ("one ", b"two "):
                send_intermediate_predict_response(
                    [word for _ in data], context.request_ids, "Intermediate Prediction success", 200, context
                )
            return ["three" for _ in data]
        """,
    )
    assert outputs(handler, ["a", "b"]) == ["one two three", "one two three"]


def test_each_record_is_a_sequence_of_its_own(tmp_path: Path) -> None:
    handler = write(
        tmp_path,
        """
        def handle(data, context):
            if data is None:
                return
            for row in range(len(data)):
                context.set_response_header(row, "x", "y")
                assert context.get_response_headers(row) == {"x": "y"}
                assert context.get_request_header(row, context.header_key_sequence_start) is None
            return [context.get_sequence_id(row) for row in range(len(data))]
        """,
    )
    assert len(set(outputs(handler, ["a", "b", "c"]))) == 3


@pytest.mark.parametrize(
    "statement",
    [
        "context.set_response_header(0, 'ts_stream_next', 'true')",
        "context.stopping_criteria = [lambda answer: False for _ in data]",
    ],
)
def test_an_answer_that_wants_another_call_is_its_record_s_error(tmp_path: Path, statement: str) -> None:
    handler = write(
        tmp_path, f"def handle(data, context):\n    if data:\n        {statement}\n    return data and ['a']"
    )
    (answer,) = outputs(handler, ["a"])
    assert isinstance(answer, RecordError)
    assert "over several calls" in str(answer)


def test_micro_batches_keep_their_order(tmp_path: Path) -> None:
    handler = write(
        tmp_path,
        """
        from ts.handler_utils.micro_batching import MicroBatching
        from ts.torch_handler.base_handler import BaseHandler

        class Parts(BaseHandler):
            def __init__(self):  # without that of its base
                self.handle = MicroBatching(self)

            def initialize(self, ctx):
                config = ctx.model_yaml_config["micro_batching"]
                self.handle.parallelism = config["parallelism"]
                self.handle.micro_batch_size = config["micro_batch_size"]

            def preprocess(self, data):
                return [row["body"].decode() for row in data]

            def inference(self, texts):
                return [(text, len(texts), self.handle.get_micro_batch_idx()) for text in texts]

            def postprocess(self, answers):
                return answers
        """,
    )
    (tmp_path / "model-config.yaml").write_text(
        "micro_batching:\n  micro_batch_size: 2\n  parallelism:\n    preprocess: 3\n    inference: 1\n"
    )
    assert outputs(handler, list("abcde")) == [("a", 2, 0), ("b", 2, 0), ("c", 2, 1), ("d", 2, 1), ("e", 1, 2)]


def test_a_handler_is_loaded_and_called_on_one_thread(tmp_path: Path) -> None:
    handler = write(
        tmp_path,
        """
        import sqlite3

        def handle(data, context):
            global store
            if data is None:
                store = sqlite3.connect(":memory:")
                return
            return [store.execute("SELECT 1 + 1").fetchone()[0] for _ in data]
        """,
    )
    assert outputs(handler, ["a"]) == [2]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model-config.yaml", "responseTimeout: 1"),
        ("config.properties", "default_response_timeout=1"),
        (
            "config.properties",
            'default_response_timeout=60\nmodels={"my_handler": {"1.0": {"responseTimeout": 1}}}',
        ),
    ],
)
def test_a_handler_that_does_not_answer_in_its_time_is_a_dead_engine(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    source = "import threading\n\ndef handle(data, context):\n    if data:\n        threading.Event().wait(300)"
    engine = create("custom", engine="torchserve", handler=write(tmp_path, source))
    batch = [one.payload for one in engine.prepare(["a"])]
    for _ in range(2):  # the second is not even begun
        with pytest.raises(EngineDeadError, match=r"my_handler\.py has not returned within 1 s.*responseTimeout"):
            engine.forward(batch)
    engine.close()


def test_a_handler_that_does_not_load_in_its_time_is_a_dead_engine(tmp_path: Path) -> None:
    (tmp_path / "model-config.yaml").write_text("startupTimeout: 1")
    source = "import threading\n\ndef handle(data, context):\n    threading.Event().wait(300)"
    with pytest.raises(EngineDeadError, match=r"within 1 s.*startupTimeout"):
        outputs(write(tmp_path, source), ["a"])


def test_a_time_limit_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model-config.yaml").write_text("responseTimeout: 0")
    with pytest.raises(ConfigError, match="responseTimeout is 0; it must be a whole number >= 1"):
        outputs(write(tmp_path, PLAIN), ["a"])


def test_a_timeout_of_the_handler_s_own_is_an_error_like_any_other(tmp_path: Path) -> None:
    source = "def handle(data, context):\n    if data:\n        raise TimeoutError('database')\n"
    with pytest.raises(TimeoutError, match="database"):
        outputs(write(tmp_path, source), ["a"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "import no_such_library",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_library' .line 1.",
        ),
        ("def handle(:", "cannot be imported: SyntaxError: invalid syntax"),
        ("\nraise SystemExit(3)", "cannot be imported: SystemExit: 3 .line 2.$"),
        ("raise KeyboardInterrupt", "cannot be imported: KeyboardInterrupt .line 1.$"),
        ("raise RuntimeError('two\\nlines')", "cannot be imported: RuntimeError: two lines .line 1.$"),
        ("class Own(BaseException): ...\nraise Own", "cannot be imported: Own"),
        ("def handle(data, context):\n    raise SystemExit", "cannot be initialized: SystemExit .line 2.$"),
        ("from ts.torch_handler.text_classifier import T", "No module named 'ts.torch_handler.text_cl"),
        ("from ts.torch_handler.base_handler import Nothing", "ImportError: cannot import name 'Nothing'"),
    ],
)
def test_whatever_stops_a_handler_from_loading_is_one_line(tmp_path: Path, content: str, words: str) -> None:
    before = threading.active_count()
    with pytest.raises(EngineError, match=words) as caught:
        outputs(write(tmp_path, content), ["a"])
    assert str(caught.value).startswith("handler my_handler.py cannot be ")
    assert "\n" not in str(caught.value)
    assert threading.active_count() <= before + 1  # its thread ends
