"""Three real models behind one server, asked by openai's client while they are loaded and unloaded by hand.

No request may fail, and every answer must be what the model answered at first.

python -m benchmarks.rolling            # --quick for a short run
"""

from __future__ import annotations

import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.common import quick, report

SECONDS = 10 if quick() else 60
CALLERS = 6
EXAMPLE = Path(__file__).parents[1] / "examples" / "models.yaml"
"""An embedder, a classifier and a generator."""
MAIN = "import sys; sys.argv[0] = 'headrace'; from headrace.cli.main import main; main()"
KEYS = "caller k-caller\noperator k-operator admin\n"

ASKED: dict[str, Callable[[openai.OpenAI], object]] = {
    "minilm": lambda user: user.embeddings.create(model="minilm", input="a text").data[0].embedding,
    "docstrings": lambda user: user.post(
        str(user.base_url.join("/classify")),
        cast_to=dict[str, Any],
        body={"model": "docstrings", "input": "Start a thread and wait for it."},
    )["data"][0]["label"],
    "sums": lambda user: user.completions.create(model="sums", prompt="12+34=", temperature=0).choices[0].text,
}
"""A request to each model; returns what it must answer each time."""


@contextlib.contextmanager
def server() -> Iterator[str]:
    """`headrace serve --config`; its address."""
    with tempfile.TemporaryDirectory() as folder:
        keys, config = Path(folder) / "keys", Path(folder) / "models.yaml"
        keys.write_text(KEYS)
        config.write_text(EXAMPLE.read_text().replace("max_models: 2", "max_models: 3"))
        command = ["serve", "--config", str(config), "--api-key-file", str(keys), "--port", "0"]
        process = subprocess.Popen([sys.executable, "-c", MAIN, *command], stderr=subprocess.PIPE, text=True, bufsize=1)
        assert process.stderr is not None
        try:
            yield next(found[1] for line in process.stderr if (found := re.search(r"ready at (http\S+):", line)))
        finally:
            process.terminate()
            process.communicate(timeout=60)


class Callers:
    """Threads that ask a model each, for the time of the benchmark once all have an answer."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ready = threading.Barrier(CALLERS)
        self.seconds: dict[str, list[float]] = {name: [] for name in ASKED}
        self.failed: Counter[str] = Counter()

    def ask(self, name: str) -> None:
        """Ask a model; each answer must be as the first."""
        ask = ASKED[name]
        with openai.OpenAI(base_url=f"{self._address}/v1", api_key="k-caller", max_retries=0) as user:
            wanted = ask(user)
            self._ready.wait()
            ends = time.monotonic() + SECONDS
            while (began := time.monotonic()) < ends:
                try:
                    answer = ask(user)
                except openai.OpenAIError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    self.failed[name] += 1
                    continue
                self.seconds[name].append(time.monotonic() - began)
                if not same(answer, wanted):
                    print(f"{name}: {answer!r:.200} is not {wanted!r:.200}", file=sys.stderr)
                    self.failed[name] += 1


def same(answer: object, wanted: object) -> bool:
    """Whether a model gave the same answer; vectors up to what batches of other sizes round."""
    if isinstance(answer, list) and isinstance(wanted, list):
        return all(abs(one - other) < 1e-2 for one, other in zip(answer, wanted, strict=True))
    return answer == wanted


def roll(address: str, over: threading.Event) -> Counter[str]:
    """Unload and load the models in turn; how often each."""
    rolled: Counter[str] = Counter()
    with httpx.Client(base_url=address, headers={"authorization": "Bearer k-operator"}, timeout=120) as client:
        while not over.is_set():
            name = [*ASKED][rolled.total() % len(ASKED)]
            for path in ("/models/unload", "/models/load"):
                client.post(path, json={"model": name}).raise_for_status()
                over.wait(0.3)
            rolled[name] += 1
    return rolled


def loads(address: str) -> dict[str, int]:
    """How often the server loaded each model."""
    page = httpx.get(f"{address}/metrics", headers={"authorization": "Bearer k-operator"}).raise_for_status().text
    found = re.findall(r'^headrace_model_loads_total\{model="(.+)"\} (.+)$', page, re.MULTILINE)
    return {name: int(float(count)) for name, count in found}


def main() -> None:
    """One table; ends with an error if a request failed."""
    with server() as address, ThreadPoolExecutor(CALLERS + 1) as threads:
        callers, over = Callers(address), threading.Event()
        asking = [threads.submit(callers.ask, name) for name in [*ASKED] * (CALLERS // len(ASKED))]
        rolling = threads.submit(roll, address, over)
        try:
            for one in asking:
                one.result()
        finally:
            over.set()
        rolled, loaded = rolling.result(), loads(address)
    rows = [
        [name, len(times), callers.failed[name], rolled[name], loaded[name], statistics.median(times) * 1000,
         statistics.quantiles(times, n=100)[98] * 1000]
        for name, times in callers.seconds.items()
    ]  # fmt: skip
    report(
        "rolling",
        f"Three models behind one server: {CALLERS} clients of openai for {SECONDS} s",
        ["model", "answers", "failed", "unloaded and loaded by hand", "loads", "median, ms", "p99, ms"],
        rows,
    )
    if callers.failed:
        raise SystemExit(f"{callers.failed.total()} requests failed")


if __name__ == "__main__":
    main()
