"""One contender of `headrace bench`, in its own process: it loads the model and measures each size.

python -m headrace.app.bench_contender REQUEST.json

A contender is a library as its own documentation uses it: it gets all texts and returns all outputs. What is compared
is imported by name, as Headrace itself needs none of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypeAlias, TypedDict

Texts: TypeAlias = list[str]
RunTexts: TypeAlias = Callable[[Texts, int | None], tuple[float, Sequence[object]]]
"""Runs all texts with a batch size, None for the contender's default; returns the seconds and the outputs in order."""


class BenchRequest(TypedDict):
    """What a contender is to do."""

    contender: str
    task: str
    model: str
    dtype: str
    device: str
    max_tokens: int
    texts: Texts
    sizes: list[int | None]
    results: str
    """The file that gets a `Measurement` for each size, one a line."""
    ready: str
    """A file in which Ray's worker says when its model is loaded."""


class Measurement(TypedDict):
    """What one size gave."""

    size: int | None
    seconds: NotRequired[float]
    outputs: NotRequired[list[object]]
    error: NotRequired[str]


TASKS = ("embed", "classify", "generate")
_COMPARED = 200
"""Outputs that are kept for the comparison."""
_WARM_UP = 16
_COLUMNS = {"embed": "embedding", "classify": "classification", "generate": "generation"}


def _timed(call: Callable[[Texts, int | None], Sequence[object]]) -> RunTexts:
    def run(texts: Texts, size: int | None) -> tuple[float, Sequence[object]]:
        started = time.perf_counter()
        outputs = call(texts, size)
        return time.perf_counter() - started, outputs

    return run


def _headrace(request: BenchRequest) -> RunTexts:
    """A job from a list to a list, its model loaded before the clock starts, as for the others."""
    from headrace.app.jobs.job import carry_out
    from headrace.app.jobs.plan import check
    from headrace.app.jobs.tuning import load
    from headrace.engines.choosing.config import EngineConfig
    from headrace.jobs.pipeline.job import StopRequest
    from headrace.jobs.settings import JobSettings

    column = _COLUMNS[request["task"]]

    def run(texts: Texts, size: int | None) -> tuple[float, Sequence[object]]:
        rows: list[dict[str, object]] = []
        options: dict[str, object] = {"dtype": request["dtype"], "device": request["device"]}
        if request["task"] == "generate":
            options |= {"max_tokens": request["max_tokens"], "temperature": 0.0}
        config = EngineConfig(request["task"], request["model"], None, options, batch_size=size)
        plan = check(JobSettings(texts, rows.extend, config, on_nan="null", dedupe=False))
        engine = load(plan)
        started = time.perf_counter()
        carry_out(plan, engine, StopRequest(), progress=False)
        return time.perf_counter() - started, [row[column] for row in rows]

    return run


def _plain(request: BenchRequest) -> Callable[[Texts, int | None], list[object]]:
    """The usual library of the task, without any batching around it."""
    device = None if request["device"] == "auto" else request["device"]
    if request["task"] == "embed":
        sentence_transformers = import_module("sentence_transformers")
        model = sentence_transformers.SentenceTransformer(
            request["model"], device=device, model_kwargs={"dtype": request["dtype"]}
        )
        return lambda texts, size: list(model.encode(texts, **_size(size)))
    transformers = import_module("transformers")
    task = {"classify": "text-classification", "generate": "text-generation"}[request["task"]]
    pipe = transformers.pipeline(task, model=request["model"], device=device, dtype=request["dtype"])
    if request["task"] == "classify":
        return lambda texts, size: list(pipe(texts, truncation=True, **_size(size)))
    if pipe.tokenizer.pad_token is None:
        pipe.tokenizer.pad_token = pipe.tokenizer.eos_token
    pipe.tokenizer.padding_side = "left"
    settings = {"max_new_tokens": request["max_tokens"], "do_sample": False, "return_full_text": False}
    return lambda texts, size: [one[0]["generated_text"] for one in pipe(texts, **settings, **_size(size))]


def _size(size: int | None) -> dict[str, int]:
    return {} if size is None else {"batch_size": size}


def _vllm(request: BenchRequest) -> RunTexts:
    vllm = import_module("vllm")
    runner = "generate" if request["task"] == "generate" else "pooling"
    llm = vllm.LLM(request["model"], runner=runner, dtype=request["dtype"])
    if request["task"] == "embed":
        return _timed(lambda texts, _: [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)])
    if request["task"] == "classify":
        labels = json.loads(Path(request["model"], "config.json").read_text()).get("id2label", {})

        def classify(texts: Texts, _: int | None) -> list[str]:
            found = [one.outputs.probs for one in llm.classify(texts, use_tqdm=False)]
            return [str(labels.get(str(best := probs.index(max(probs))), best)) for probs in found]

        return _timed(classify)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"])
    return _timed(lambda texts, _: [one.outputs[0].text for one in llm.generate(texts, sampling, use_tqdm=False)])


class _RayDataWorker:
    """What `map_batches` calls. Each execution starts it again, so it says when its model is loaded."""

    def __init__(self, request: BenchRequest) -> None:
        self._call = _plain(request)
        Path(request["ready"]).write_text(str(time.monotonic()))  # this clock is the same in all processes

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[str]]:
        texts = [str(text) for text in batch["item"]]
        outputs = self._call(texts, len(texts))
        return {"output": [json.dumps(_json(one)) for one in outputs]}


def _ray_data(request: BenchRequest) -> RunTexts:
    ray = import_module("ray")
    data = import_module("ray.data")
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    context = data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False

    def run(texts: Texts, size: int | None) -> tuple[float, Sequence[object]]:
        mapped = data.from_items(texts).map_batches(
            _RayDataWorker, fn_constructor_args=(request,), concurrency=1, **_size(size)
        )
        rows = mapped.take_all()
        return time.monotonic() - float(Path(request["ready"]).read_text()), [json.loads(row["output"]) for row in rows]

    return run


def _flyte(request: BenchRequest) -> RunTexts:
    extras = import_module("flyte.extras")
    call = _plain(request)

    async def process(batch: Texts) -> list[object]:
        return await asyncio.to_thread(call, batch, len(batch))

    async def all_of(texts: Texts, size: int | None) -> list[object]:
        async with extras.DynamicBatcher(process, **({"max_batch_size": size} if size else {})) as batcher:
            return list(await asyncio.gather(*[await batcher.submit(text) for text in texts]))

    return _timed(lambda texts, size: asyncio.run(all_of(texts, size)))


class Contender(NamedTuple):
    """What Headrace is compared with."""

    load: Callable[[BenchRequest], RunTexts]
    module: str
    """It is there if this can be imported."""
    tasks: tuple[str, ...] = TASKS
    takes_size: bool = True
    """Whether a call takes a batch size."""


CONTENDERS = {
    "headrace": Contender(_headrace, "headrace"),
    "sentence-transformers": Contender(lambda given: _timed(_plain(given)), "sentence_transformers", ("embed",)),
    "transformers pipeline": Contender(lambda given: _timed(_plain(given)), "transformers", ("classify", "generate")),
    "vllm": Contender(_vllm, "vllm", takes_size=False),
    "ray data": Contender(_ray_data, "ray"),
    "flyte": Contender(_flyte, "flyte"),
}


def _json(output: Any) -> object:
    """An output as JSON: a vector, a label or a text."""
    if isinstance(output, dict):
        return output.get("label", output.get("text", output))
    return (
        [float(number) for number in output] if hasattr(output, "__len__") and not isinstance(output, str) else output
    )


def _end_with_parent() -> None:
    """End this process and its children when the one that started it has ended, which closes standard input."""

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    if os.getpgrp() == os.getpid() and stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Measure each size of the request."""
    _end_with_parent()
    request: BenchRequest = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    texts = request["texts"]
    run = CONTENDERS[request["contender"]].load(request)
    run(texts[:_WARM_UP], None)
    with Path(request["results"]).open("w", encoding="utf-8") as file:
        for size in request["sizes"]:
            try:
                seconds, outputs = run(texts, size)
                if len(outputs) != len(texts):
                    raise ValueError(f"{len(outputs)} outputs for {len(texts)} texts")
                kept = [_json(one) for one in outputs[:_COMPARED]]
                found: Measurement = {"size": size, "seconds": seconds, "outputs": kept}
            except Exception as error:  # noqa: BLE001 - whatever a library raises is a row that says so
                found = {"size": size, "error": f"{type(error).__name__}: {error}"}
            file.write(json.dumps(found) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
