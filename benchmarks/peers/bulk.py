"""The no-op job with another library, for `benchmarks.host`: `python -m benchmarks.peers.bulk NAME INPUT OUTPUT`.

Each reads and writes with what it has for the format, and its function gives two numbers for each row of a batch.
Prints its seconds without imports and without starting its cluster, and its MiB, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

BATCH = 4096


def clock() -> Callable[[], None]:
    """Print the seconds from now to the call of what it returns, and the most memory that this process held."""
    started = time.perf_counter()

    def done() -> None:
        seconds = time.perf_counter() - started
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
        print(json.dumps({"s": seconds, "mib": peak}), flush=True)

    return done


def _vectors(count: int) -> Any:
    import numpy as np
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(np.tile(np.array([0.5, 0.25], np.float32), count)), 2)


def daft(source: str, sink: str) -> None:
    """Daft's own engine, on all cores."""
    import daft as df

    @df.func.batch(return_dtype=df.DataType.fixed_size_list(df.DataType.float32(), 2))  # type: ignore[untyped-decorator]
    def infer(texts: Any) -> Any:
        return df.Series.from_arrow(_vectors(len(texts)))  # an array of NumPy would take forty times as long

    df.set_runner_native()  # else it looks for a cluster of Ray, which takes longer than the job
    done = clock()
    rows = (df.read_parquet if source.endswith("parquet") else df.read_json)(source)
    rows = rows.select(df.col("id"), infer(df.col("text")).alias("embedding"))
    (rows.write_parquet if "parquet" in sink else rows.write_json)(sink)
    done()
    os._exit(0)  # its threads crash the interpreter at its end, in half of the runs


def ray(source: str, sink: str) -> None:
    """Ray Data on all cores, whole blocks in Arrow: batches of NumPy arrays take longer."""
    import pyarrow as pa
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def infer(batch: Any) -> Any:
        return pa.table({"id": batch["id"], "embedding": _vectors(len(batch))})

    done = clock()
    rows = ray.data.read_parquet(source) if source.endswith("parquet") else ray.data.read_json(source, lines=True)
    rows = rows.map_batches(infer, batch_format="pyarrow", batch_size=None, zero_copy_batch=True)
    (rows.write_parquet if "parquet" in sink else rows.write_json)(sink)
    done()
    ray.shutdown()


def datatrove(source: str, sink: str) -> None:
    """datatrove's reader and writer with a step between, one task: it divides work by files, and there is one."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.base import PipelineStep
    from datatrove.pipeline.readers import JsonlReader, ParquetReader
    from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

    class Infer(PipelineStep):  # type: ignore[misc]  # the base has no types
        def run(self, data: Iterator[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
            del rank, world_size
            while batch := list(islice(data, BATCH)):
                for document, output in zip(batch, [[0.5, 0.25]] * len(batch), strict=True):
                    document.metadata["embedding"] = output
                    yield document

    def row(_: Any, document: Any) -> dict[str, Any]:
        return {"id": document.id, "embedding": document.metadata["embedding"]}

    folder, name = Path(source).parent, Path(source).name
    reader = ParquetReader if source.endswith("parquet") else JsonlReader
    writer = ParquetWriter if "parquet" in sink else JsonlWriter
    options = {} if writer is ParquetWriter else {"compression": None}
    done = clock()
    steps = [reader(str(folder), glob_pattern=name), Infer(), writer(sink, adapter=row, **options)]
    LocalPipelineExecutor(steps, logging_dir=f"{sink}.logs").run()
    done()


VARIANTS: dict[str, Callable[[str, str], None]] = {
    "daft": daft,
    "ray": ray,
    "datatrove": datatrove,
}


def main(arguments: Sequence[str]) -> None:
    """Run one variant."""
    name, source, sink = arguments
    VARIANTS[name](source, sink)


if __name__ == "__main__":
    main(sys.argv[1:])
