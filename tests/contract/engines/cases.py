"""Every engine there is, with inputs that suit it: the same contract holds for all."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.families import colbert, family_model
from tests.small_models import NLI, encoded, picture, text_model, vision_model

from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import create
from headrace.testing import FakeEngine, FakeStepEngine, FakeStreamEngine

TEXTS = ["", "a", "the canal feeds the wheel", "so that it never runs dry " * 7, "naïve 水車", "words " * 300]
WORDS = [text for text in TEXTS if text]
PAIRS = [(text, other) for text in TEXTS[1:4] for other in ("", "a mill", "turns and turns " * 9)]
NO_TEXTS = [None, 7, "half \ud800", ["a", "list"]]
IMAGES = [encoded(picture(width, 30, seed=width)) for width in (31, 8, 70, 30)]
NO_IMAGES = [None, b"no image", "/no/such/image.png", IMAGES[0][:60], 3]
ASKS = [
    "12+34=",
    "Q: Ada has 12 eggs and gets 34 more. How many now?\nA: ",
    [{"role": "user", "content": "What is 31+44?"}],
    {"prompt": "55+16=", "max_tokens": 40, "ignore_eos": True},
    {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "27+27"}], "max_tokens": 2},
    "nothing to add",
]
NO_ASKS = [None, "", "x" * 2_000, [{"role": "wizard", "content": "hi"}], {"prompt": "a", "temperature": -1}, 7]


def marked(box: tuple[int, int, int, int] | None = None) -> bytes:
    """One picture, with a part of it painted over."""
    image = picture(30, 30, seed=5)
    if box is not None:
        image.paste((255, 0, 0), box)
    return encoded(image)


SENTENCE = "the canal feeds the wheel"
TEXT_TWINS = [(SENTENCE, "the canal feeds the mill"), (SENTENCE, "a canal feeds the wheel")]
PAIR_TWINS = [((SENTENCE, one), (SENTENCE, other)) for one, other in TEXT_TWINS] + [
    ((one, SENTENCE), (other, SENTENCE)) for one, other in TEXT_TWINS
]
IMAGE_TWINS = [(marked(), marked((0, 0, 9, 9))), (marked(), marked((21, 21, 30, 30)))]
ASK_TWINS = [("12+34=", "12+34+"), ("12+34=", "92+34=")]

HANDLER = """
import ts.torch_handler.base_handler


class Shouting(ts.torch_handler.base_handler.BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def preprocess(self, data):
        return [row.get("data") or row.get("body") for row in data]

    def inference(self, data):
        return [text.decode().upper() for text in data]

    def postprocess(self, data):
        return data
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine is made."""

    folder: Path
    """Empty, and the engine's own."""
    device: str
    """ "cpu" or "cuda"."""
    stack: ExitStack
    """Ends with the engine."""


class Maker(Protocol):
    """Makes the engine under contract."""

    def __call__(self, place: Place) -> Any: ...


@dataclass(frozen=True, slots=True)
class Case:
    """An engine under contract."""

    make: Maker
    good: list[Any]
    bad: list[Any]
    kind: str = "batch"
    """"batch", "step" or "stream": who decides what runs together."""
    needs: str | None = None
    """A library that this engine has an environment of its own for."""
    placed: bool = False
    """Whether it runs on the device it is given."""


def own(values: list[Any]) -> list[Any]:
    """A user's function."""
    return [f"{value}!" for value in values]


def torch(task: str, model: Any = None, **options: Any) -> Maker:
    """PyTorch's engine of a task, with a model by name or one that is made in the engine's folder."""

    def make(place: Place) -> Any:
        folder = model(place.folder) if callable(model) else model
        # The weights' own dtype, which a device takes by default, may be too coarse for what is compared.
        return create(task, folder, device=place.device, dtype="float32", **options)

    return make


@dataclass(frozen=True, slots=True)
class Exported:
    """Makes an ONNX engine of a model that is exported on the spot."""

    task: str
    model: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, place: Place) -> Any:
        from scripts.export_onnx import export

        exported = place.folder.parent / f"onnx-{self.task}"  # takes seconds: made once for all tests
        if not exported.exists():
            export(str(self.model(place.folder)) if callable(self.model) else self.model, exported, self.task)
        return create(self.task, exported, engine="onnx", **self.options)

    def original(self, place: Place) -> Any:
        """PyTorch's engine of the same model."""
        return torch(self.task, self.model, **self.options)(place)


def archive(place: Place) -> Any:
    """A TorchServe archive's engine."""
    manifest = {"model": {"modelName": "shout", "handler": "shout.py", "modelVersion": "1.0"}, "runtime": "python"}
    with zipfile.ZipFile(place.folder / "shout.mar", "w") as mar:
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        mar.writestr("shout.py", HANDLER)
        mar.writestr("model-config.yaml", "batchSize: 8\nmaxBatchDelay: 20\n")
    return create("custom", engine="torchserve", handler=place.folder / "shout.mar")


def endpoint(place: Place) -> Any:
    """A server of Headrace's own, over a real socket."""
    from tests.integration.serving.running import running

    from headrace.app.servers.server import ServerSettings

    server = place.stack.enter_context(
        running(ServerSettings(EngineConfig("embed", engine="headrace.testing:FakeEngine")))
    )
    return create("embed", engine="endpoint", endpoints=[server.url])


def vllm(place: Place) -> Any:
    """The real one, in processes of its own."""
    small: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4, "max_model_len": 512}
    return create("generate", engine="vllm", chat=False, max_tokens=16, **small)


def vllm_embed(place: Place) -> Any:
    """vLLM's pooling runner, whose attention on CPU needs heads of 32."""
    folder = family_model(place.folder, "Bert", hidden_size=64)
    return create("embed", folder, engine="vllm", dtype="float32", enforce_eager=True, max_model_len=128)


ZERO_SHOT = {"labels": ["canal", "mill", "water wheel"]}


def scorer(folder: Path) -> Path:
    """A cross-encoder, wide enough to run without padding."""
    return text_model(folder, ["x"], hidden_size=256, initializer_range=0.1)


def judge(folder: Path) -> Path:
    """A model of natural language inference."""
    return text_model(folder, NLI)


def encoder(folder: Path) -> Path:
    """A network without a head, as embedding models are."""
    return text_model(folder, head=False)


def masked(folder: Path) -> Path:
    """A masked language model."""
    return family_model(folder, "Bert", "ForMaskedLM")


def late(folder: Path) -> Path:
    """A model with a vector per token."""
    return colbert(folder / "colbert")


def clip(folder: Path) -> Path:
    """A model of images and texts."""
    return vision_model(folder, "clip")


CASES: Mapping[str, Case] = {
    "fake": Case(lambda place: FakeEngine(), TEXTS, NO_TEXTS[:2]),
    "fake-steps": Case(lambda place: FakeStepEngine(), WORDS, ["", *NO_TEXTS[:2]], "step"),
    "fake-stream": Case(lambda place: FakeStreamEngine(), TEXTS, NO_TEXTS[:2], "stream"),
    "function": Case(lambda place: create("custom", engine="tests.contract.engines.cases:own"), TEXTS, []),
    "torchserve": Case(archive, TEXTS, [None, "half \ud800"]),
    "endpoint": Case(endpoint, WORDS, [None, "", 7], "stream"),
    "embed": Case(torch("embed"), TEXTS, NO_TEXTS, placed=True),
    "sparse-embed": Case(torch("sparse-embed", masked), TEXTS, NO_TEXTS, placed=True),
    "multi-vector-embed": Case(torch("multi-vector-embed", late), TEXTS, NO_TEXTS, placed=True),
    "classify": Case(torch("classify", "docstrings", top_labels=7), TEXTS, NO_TEXTS[:3], placed=True),
    "classify-pairs": Case(torch("classify", text_model), PAIRS, NO_TEXTS[:3], placed=True),
    "score": Case(torch("score", scorer), PAIRS, NO_TEXTS[:3], placed=True),
    "zero-shot": Case(torch("zero-shot", judge, **ZERO_SHOT), TEXTS, NO_TEXTS, placed=True),
    "image-classify": Case(torch("image-classify", "digits"), IMAGES, NO_IMAGES, placed=True),
    "image-embed": Case(torch("image-embed", clip), IMAGES, NO_IMAGES, placed=True),
    "generate": Case(torch("generate", max_num_seqs=4, max_tokens=16), ASKS, NO_ASKS, "step", placed=True),
    "generate-static": Case(torch("generate", engine="static", max_tokens=16), ASKS, NO_ASKS, placed=True),
    "onnx-embed": Case(Exported("embed", encoder), TEXTS, NO_TEXTS),
    "onnx-classify": Case(Exported("classify", "docstrings", {"top_labels": 7}), TEXTS, NO_TEXTS[:3]),
    "onnx-score": Case(Exported("score", scorer), PAIRS, NO_TEXTS[:3]),
    "onnx-zero-shot": Case(Exported("zero-shot", judge, ZERO_SHOT), TEXTS, NO_TEXTS),
    "onnx-image-classify": Case(Exported("image-classify", "digits", {"top_labels": 3}), IMAGES, NO_IMAGES),
    "onnx-image-embed": Case(Exported("image-embed", clip), IMAGES, NO_IMAGES),
    "vllm": Case(vllm, ASKS, NO_ASKS, "stream", needs="vllm"),
    "vllm-embed": Case(vllm_embed, TEXTS, NO_TEXTS, "stream", needs="vllm"),
}
"""One for each engine of `headrace.engines.choosing.registry`, and the doubles of `headrace.testing`."""


def twins(case: Case) -> list[tuple[Any, Any]]:
    """Inputs for an engine that differ at their very end, or at their very beginning."""
    taken: dict[type, list[tuple[Any, Any]]] = {str: TEXT_TWINS, tuple: PAIR_TWINS, bytes: IMAGE_TWINS}
    return ASK_TWINS if case.good is ASKS else taken[type(case.good[0])]


def of_kind(kind: str) -> list[str]:
    """The names of some of them."""
    return [name for name, case in CASES.items() if case.kind == kind]


def missing(case: Case) -> str | None:
    """Why a case cannot run in this environment."""
    if case.needs is None or importlib.util.find_spec(case.needs) is not None:
        return None
    return f"{case.needs} is not installed here: scripts/test-{case.needs}"
