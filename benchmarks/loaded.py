"""A small job on a model that is loaded, and the least that its texts could take: `python -m benchmarks.loaded`.

The least is the engine's own forward pass over all texts at once, tokenized before, with no job around it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import headrace
from benchmarks.common import quick, ratio, report, rounds
from benchmarks.embedding import texts
from headrace.engines.choosing import registry

TEXTS = 60
ROUNDS = 3 if quick() else 25


def main() -> None:
    """Measure in turn and print."""
    inputs = texts()[:TEXTS]
    with headrace.load("embed") as model:
        engine = registry.create("embed", dtype=model.describe()["dtype"])
        prepared = engine.prepare(inputs)
        payloads = [one.payload for one in prepared]

        def run() -> object:
            return model.run(inputs, sink="list")

        variants: dict[str, Callable[[], object]] = {
            "`model.run(texts, sink='list')`": run,
            "`model(texts)`": lambda: model(inputs),
            "tokenizing": lambda: engine.prepare(inputs),
            "the forward pass alone, all texts at once": lambda: engine.forward(payloads),
        }

        def timed(call: Callable[[], object]) -> float:
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * 1e3

        for call in variants.values():
            call()  # the first is slower
        found = rounds(ROUNDS, {name: (lambda call=call: timed(call)) for name, call in variants.items()})
        engine.close()
    least = found["the forward pass alone, all texts at once"]
    rows = [[name, round(statistics.median(took), 1), ratio(took, least)] for name, took in found.items()]
    note = f"{TEXTS} docstrings, {sum(one.cost for one in prepared)} tokens; medians of {ROUNDS} calls, in turn."
    report("loaded", "A job of 60 texts on a loaded model", ["", "ms", "times the forward pass"], rows, [note])


if __name__ == "__main__":
    main()
