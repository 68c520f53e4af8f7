"""The example of questions.py on Flyte, in two ways: an app that Flyte scales, and reusable workers with the model.

python examples/questions_flyte.py      # in Flyte's local mode

HEADRACE_GSM8K and QUESTIONS_ENGINE as for examples/questions.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import flyte

import headrace
from examples.questions import ENGINE, OPTIONS, answer_all, ask, fetch
from headrace.batching.passthrough import PassthroughBatcher
from headrace.cluster.flyte.app import app_environment
from headrace.engines.choosing.registry import create

VLLM = ENGINE == "vllm"
served = {"engine": ENGINE, **(OPTIONS if VLLM else {})}
app = app_environment("sums-app", "generate", replicas=(0, 2), concurrency=10, scaledown_after_s=300, **served)
env = flyte.TaskEnvironment(
    name="questions",
    reusable=flyte.ReusePolicy(replicas=2, concurrency=8, idle_ttl=300),
    depends_on=[app],
)


@headrace.reusable(idle_timeout_s=300)
def model() -> Iterator[headrace.Batcher[headrace.Prompt, str]]:
    """One model and one batcher for all tasks that a worker process runs at a time."""
    options = {"engine": "vllm", "chat": False, **OPTIONS} if VLLM else {"engine": "static"}
    engine = create("generate", max_tokens=16, **options)

    def prepared(prompts: list[headrace.Prompt]) -> list[Any]:
        return [entry.payload for entry in engine.prepare([prompt.text for prompt in prompts])]

    async def infer_one(prompt: headrace.Prompt) -> str:  # by vLLM, which batches by itself
        return str((await engine.infer(prepared([prompt])[0]))["text"])

    def infer(prompts: list[headrace.Prompt]) -> list[str]:
        return [answer["text"] for answer in engine.forward(prepared(prompts))]

    if VLLM:
        yield PassthroughBatcher(infer_one, max_in_flight=engine.profile.max_in_flight)
    else:
        yield headrace.TokenBatcher(inference_fn=infer, target_batch_tokens=4_000)
    engine.close()


@env.task(retries=20)
async def from_app(url: str, prompts: list[str]) -> list[str]:
    """A chunk through the app: its replicas batch what all tasks send."""
    return await ask(url, prompts)


@env.task(retries=20)
async def from_worker(prompts: list[str]) -> list[str]:
    """A chunk through the model of this worker, which all tasks of the worker share."""
    return await model.map([headrace.Prompt(text) for text in prompts])


@env.task
async def both(url: str, limit: int = 400) -> str:
    """Fan out over the app, then over the workers."""
    rows = fetch(limit)
    by_app = await answer_all(partial(from_app.aio, url), rows)
    by_workers = await answer_all(from_worker.aio, rows)
    batches = "" if VLLM else f", {model.stats.avg_batch_size:.0f} records a batch"
    return f"app: {by_app}\nworkers: {by_workers}{batches}"


def main() -> None:
    """Serve the app here and run the tasks here."""
    flyte.init()
    with flyte.with_servecontext(mode="local", activate_timeout=120).serve(app).ephemeral_ctx_sync():
        print(flyte.with_runcontext(mode="local").run(both, url=app.endpoint).outputs()[0])


if __name__ == "__main__":
    main()
