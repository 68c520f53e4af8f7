"""Search embedded docstrings: print the five names whose vectors are closest to that of a question."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from headrace import Prepared
from headrace.engines.choosing.registry import create


def embed(question: str) -> np.ndarray:
    engine = create("embed")
    [prepared] = engine.prepare([question])
    if not isinstance(prepared, Prepared):
        raise prepared
    [vector] = engine.forward([prepared.payload])
    engine.close()
    return np.asarray(vector)


def main(vectors: Path, texts: Path, question: str) -> None:
    table = pq.read_table(vectors)
    matrix = np.stack(table["embedding"].to_numpy())
    first_lines = {row["name"]: row["text"].partition("\n")[0] for row in map(json.loads, texts.open(encoding="utf-8"))}
    scores = matrix @ embed(question)
    names = table["id"].to_pylist()
    print(f'closest to "{question}" of {len(names):,}:')
    for index in np.argsort(-scores)[:5]:
        print(f"  {scores[index]:.2f}  {names[index]:<40} {first_lines[names[index]][:70]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
