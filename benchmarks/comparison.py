"""Draw the chart of the README, how many times as fast as its peers Headrace is, from the tables in `results/`.

python -m benchmarks.comparison
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from benchmarks.common import RESULTS
from benchmarks.timeline import IMAGE, INK

CHART = IMAGE.with_name("comparison.svg")
FASTER, SLOWER = "#2b8a5f", "#a0a7ae"


class Bar(NamedTuple):
    """One comparison: where its table is, the peer's row, and the figure that says how much slower the peer was."""

    work: str
    peer: str
    table: str
    row: str
    column: str
    model: str = ""


DAFT = "jsonl to jsonl', '400,000'"
"""As many records as the other libraries had; with ten times as many it is level."""
BARS = (
    Bar("Embed texts", "sentence-transformers encode", "embedding", "encode of the whole list", "headrace is x"),
    Bar("Classify texts", "transformers pipeline", "classification", "defaults", "headrace is x", "MiniLM (22 M)"),
    Bar("Classify images", "transformers pipeline", "vision", "defaults", "headrace is x", "ViT"),
    Bar("Generate", "transformers generate, batches of 16", "generation", "generate, batches", "x batches of 16"),
    Bar("Generate", "transformers continuous batching", "generation", "continuous batching", "x batches of 16"),
    Bar("Generate with vLLM", "LLM.generate, chunks of 64", "vllm", "chunks of 64", "headrace is x"),
    Bar("Generate with vLLM", "LLM.generate, all at once", "vllm", "the whole set", "headrace is x"),
    Bar("Serve embeddings", "LitServe", "serving_embedding", "litserve", "Headrace is x"),
    Bar("Serve embeddings", "BentoML", "serving_embedding", "bentoml", "Headrace is x"),
    Bar("Serve embeddings", "infinity", "serving_embedding", "infinity", "Headrace is x"),
    Bar("Bulk job, no-op model", "Daft", "host-noop-daft", DAFT, "x headrace's time", "Daft"),
    Bar("Bulk job, no-op model", "datatrove", "host-noop", "jsonl to jsonl", "x headrace's time", "datatrove"),
    Bar("Bulk job, no-op model", "Ray Data", "host-noop", "jsonl to jsonl", "x headrace's time", "Ray Data"),
)


def ratio_of(bar: Bar) -> float:
    """How many times as fast Headrace was, by its table."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{bar.table}.json").read_text())["rows"]
    [peer] = [row for row in rows if bar.row in (text := str(list(row.values()))) and bar.model in text]
    figure = float(next(value for name, value in peer.items() if name.startswith(bar.column)))
    if bar.table != "generation":
        return figure
    ours = next(row for row in rows if row["variant"].startswith("headrace, continuous"))
    return float(ours[bar.column]) / figure  # both are multiples of the first row


def main() -> None:
    """Draw the chart, and print what it shows."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "headrace", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(8.6, 3.9), layout="constrained", facecolor="white")
    for number, bar in enumerate(BARS):
        ratio = ratio_of(bar)
        print(f"{bar.work:24} {bar.peer:38} {ratio:.2f}")
        axes.barh(-number, ratio, height=0.72, color=FASTER if ratio >= 1 else SLOWER)
        axes.text(ratio + 0.04, -number, f"{ratio:.2f} ×", va="center", fontsize=9, color=INK)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks([-n for n in range(len(BARS))], [f"{bar.work} · {bar.peer}" for bar in BARS], fontsize=9, color=INK)
    axes.set_xlim(0, max(map(ratio_of, BARS)) + 0.5)
    axes.set_title("Headrace's speed as a multiple of what it is compared with", loc="left", fontsize=10, color=INK)
    axes.tick_params(length=0, colors=INK, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(CHART, metadata={"Date": None})


if __name__ == "__main__":
    main()
