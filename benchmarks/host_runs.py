"""One measurement in its own process, for `benchmarks.host`: `python -m benchmarks.host_runs NAME INPUT OUTPUT MODEL`.

It uses only what every version of Headrace has, but for `columns` and `tokens`. Prints seconds without imports, and
MiB, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

BLOCK = 1024
"""Texts that are tokenized at once."""
SENT, REPEATS = 4096, 5
"""Texts that a process that prepares gets at once, and how often it gets all of them."""
BATCH = 32_768
"""Rows that an engine that does nothing gets at once, as its peers get whole blocks."""
ARROW_BATCH = 65_536
"""Rows that pyarrow reads and writes at once where it works alone: it took the least time so."""


def clock() -> Callable[[], None]:
    """Print the seconds from now to the call of what it returns, and the most memory that this process held."""
    started = time.perf_counter()

    def done() -> None:
        seconds = time.perf_counter() - started
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
        print(json.dumps({"s": seconds, "mib": peak}), flush=True)

    return done


def texts_of(source: str) -> list[str]:
    """The texts of a JSON Lines file."""
    return [json.loads(line)["text"] for line in Path(source).read_bytes().splitlines()]


def embed(source: str, sink: str, model: str) -> None:
    """The whole job."""
    import headrace

    done = clock()
    headrace.run(source, model, sink=sink, task="embed", device="cpu", dtype="float32", progress=False)
    done()


def tokenize(source: str, _: str, model: str) -> None:
    """The tokenizer of the model in a loop; the ids are dropped."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.no_padding()
    texts = texts_of(source)
    done = clock()
    for first in range(0, len(texts), BLOCK):
        tokenizer.encode_batch_fast(texts[first : first + BLOCK])
    done()


def tokens(source: str, _: str, model: str) -> None:
    """The model's tokens as an engine of texts makes them, in a loop."""
    from transformers import AutoTokenizer

    from headrace.engines.text.splitting import LongTexts
    from headrace.engines.text.tokenizing import TextTokens

    tokenizer = AutoTokenizer.from_pretrained(model)
    own = TextTokens(tokenizer, tokenizer.model_max_length, LongTexts("truncate"))
    texts = texts_of(source)
    done = clock()
    for first in range(0, len(texts), BLOCK):
        own.prepare_column(texts[first : first + BLOCK])
    done()


def sentence_transformers(source: str, _: str, model: str) -> None:
    """`encode` of the whole list, in its batches that cost the least here."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    encoder = SentenceTransformer(model, device="cpu")
    texts = texts_of(source)
    done = clock()
    encoder.encode(texts, batch_size=256, show_progress_bar=False)
    done()


def preparing(count: int) -> Callable[[str, str, str], None]:
    """The same in processes of `--prepare-processes`, which get and give whole blocks; once they know the words."""

    def run(source: str, _: str, model: str) -> None:
        from concurrent.futures import ThreadPoolExecutor

        import pyarrow as pa
        from transformers import AutoTokenizer

        from headrace.engines.text.splitting import LongTexts
        from headrace.engines.text.tokenizing import TextTokens
        from headrace.jobs.pipeline.preparers import PreparerPool

        tokenizer = AutoTokenizer.from_pretrained(model)
        pool = PreparerPool(TextTokens(tokenizer, tokenizer.model_max_length, LongTexts("truncate")), count)
        column = pa.array(texts_of(source))
        blocks = [column[first : first + SENT] for first in range(0, len(column), SENT)]
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(pool.prepare_column, blocks * count))  # they start, and each learns the words
            done = clock()
            list(threads.map(pool.prepare_column, blocks * REPEATS))
            done()
        pool.close()

    return run


def noop(engine: str) -> Callable[[str, str, str], None]:
    """`headrace.run` with an engine that does nothing."""

    def run(source: str, sink: str, _: str) -> None:
        from headrace import run as run_job

        done = clock()
        run_job(source, sink=sink, engine=engine, batch_size=BATCH, progress=False)
        done()

    return run


def arrow(source: str, sink: str, _: str) -> None:
    """pyarrow alone, in a loop: reads the columns and writes the numbers, once, without a check of anything."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet as pq

    done = clock()
    parsed = pyarrow.json.open_json if source.endswith("jsonl") else None
    batches = parsed(source) if parsed else pq.ParquetFile(source).iter_batches(ARROW_BATCH, columns=["id", "text"])
    schema = pa.schema([("id", pa.int64()), ("output", pa.list_(pa.float32(), 2))])
    with Path(sink).open("wb") as file, pq.ParquetWriter(file, schema) as writer:
        for batch in batches:
            numbers = pa.array(np.tile(np.array([0.5, 0.25], np.float32), len(batch)))
            vectors = pa.FixedSizeListArray.from_arrays(numbers, 2)
            writer.write_batch(pa.record_batch([batch["id"], vectors], schema=schema))
    done()


VARIANTS: dict[str, Callable[[str, str, str], None]] = {
    "embed": embed,
    "tokenize": tokenize,
    "tokens": tokens,
    "sentence-transformers": sentence_transformers,
    "1": preparing(1),
    "2": preparing(2),
    "list": noop("benchmarks.noop:Noop"),
    "columns": noop("benchmarks.noop_columns:NoopColumns"),
    "arrow": arrow,
}


def main(arguments: Sequence[str]) -> None:
    """Run one variant."""
    name, source, sink, model = (*arguments, "")[:4]
    VARIANTS[name](source, sink, model)


if __name__ == "__main__":
    main(sys.argv[1:])
