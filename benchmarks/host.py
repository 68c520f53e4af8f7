"""What a record costs the processor of this machine: `python -m benchmarks.host [--quick] [TABLE ...]`.

processor: an embedding job with next to no network, in processor seconds, beside tokenizing alone and a peer.
preparing: texts a second of one process that makes tokens, and of two.
lock: time of the same job under Python's lock, by the module that held it.
noop: records a second with an engine that does nothing, beside peers (`scripts/install-peers`).

With `--before REVISION`, `processor` and `lock` have that revision, too. `--rounds 1`, `--records 400000` and
`--peers daft` make it shorter. Each measurement runs in a process of its own.
"""

from __future__ import annotations

import compileall
import functools
import importlib.metadata
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import quick, ratio, report, rounds
from benchmarks.host_lock import RATE, under_lock
from benchmarks.host_runs import REPEATS, SENT
from benchmarks.jobs import write_input
from benchmarks.versions import ROOT, checked_out


def _given(flag: str) -> str | None:
    """What follows a flag on the command line."""
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else None


PEERS = Path(os.environ.get("PEERS_PYTHON", ".venv-peers/bin/python"))
ROUNDS = 1 if quick() else int(_given("--rounds") or 3)
SMALL, LARGE = (500, 1_000) if quick() else (40_000, 80_000)
"""Texts of the embedding jobs: what is in both falls away."""
LOCKED = (500, 1_000) if quick() else (20_000, 120_000)
"""The same for the time under the lock, which is less."""
NOOP = (5_000,) if quick() else tuple(map(int, (_given("--records") or "400000,1000000").split(",")))
MEAN_WORDS = 26
"""Words of a text of 43 tokens on average, the marks around it included: docstrings have names and signs."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
PREPARING = (1, 2)
"""Processes that prepare."""
LOOK_S = 0.1
"""How often the memory of a job's processes is looked at."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one process and its children took."""

    cpu_s: float
    """Processor seconds, of all processes."""
    wall_s: float
    """From its start to its end."""
    work_s: float
    """Without its imports, as it says itself."""
    mib: float
    """The most that its processes held together, memory that they share counted once."""


def measure(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Measured:
    """Run a command to its end. Exits if it fails."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as out:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=out, stderr=said, cwd=ROOT, env={**os.environ, **(environment or {})}
        )
        most = 0.0
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            most = max(most, _memory(process.pid))
            time.sleep(LOOK_S)
        wall_s = time.perf_counter() - started
        _, status, used = ended
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        out.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with status {process.returncode}:\n{said.read()[-4000:]}")
        figures = next(json.loads(line) for line in out if line.startswith('{"s"'))
    return Measured(used.ru_utime + used.ru_stime, wall_s, figures["s"], max(most, figures["mib"]))


def _memory(pid: int) -> float:
    """MiB of a process and its children."""
    most = 0.0
    try:
        for process in (parent := psutil.Process(pid), *parent.children(recursive=True)):
            most += int(Path(f"/proc/{process.pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0]) / 1024
    except (OSError, IndexError, psutil.Error):  # one of them has just ended
        return 0.0
    return most


def write_texts(path: Path, count: int) -> None:
    """Pieces of docstrings, the same for the same seed: records of 3 to 49 words."""
    from examples.docstrings import collect

    words = " ".join(collect().values()).split()
    dice = random.Random(29)
    with path.open("w") as file:
        for number in range(count):
            first = dice.randrange(len(words) - 2 * MEAN_WORDS)
            text = " ".join(words[first : first + dice.randrange(3, 2 * MEAN_WORDS - 2)])
            file.write(json.dumps({"id": number, "text": text}) + "\n")


def write_model(folder: Path) -> None:
    """A BERT of one layer and 16 components with random weights, and the tokenizer of all-MiniLM-L6-v2."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from headrace.engines.model_folder import find_folder

    tokenizer = AutoTokenizer.from_pretrained(str(find_folder(None)), model_max_length=256)
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes)).save_pretrained(str(folder))


def _embedding_inputs(folder: Path, model: Path) -> None:
    if model.exists():
        return
    write_model(model)
    for count in (SMALL, LARGE, *LOCKED):
        write_texts(folder / f"texts-{count}.jsonl", count)


def tokens_of(path: Path, model: Path) -> float:
    """Tokens of a text on average."""
    from tokenizers import Tokenizer

    from benchmarks.host_runs import texts_of

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    return statistics.mean(len(one.ids) for one in tokenizer.encode_batch_fast(texts_of(str(path))[:2000]))


def processor(folder: Path) -> None:
    """Processor time of an embedding job by the slope between two sizes, beside tokenizing and a peer."""
    model = folder / "model"
    _embedding_inputs(folder, model)
    revision = _given("--before")
    outputs = itertools.count()

    def slope(name: str, source: Path) -> float:
        """µs of a record."""
        used = []
        for count in (SMALL, LARGE):
            sink = folder / f"vectors-{next(outputs)}.parquet"
            command = [sys.executable, "-m", "benchmarks.host_runs", name]
            command += [str(folder / f"texts-{count}.jsonl"), str(sink), str(model)]
            used.append(measure(command, {"PYTHONPATH": str(source), **ONE_THREAD}).cpu_s)
            if name == "embed":
                _check(sink, count)
        return (used[1] - used[0]) / (LARGE - SMALL) * 1e6

    with checked_out(revision) if revision else nullcontext(folder / "src") as before:
        variants: dict[str, Callable[[], float]] = {
            name: functools.partial(slope, name, folder / "src")
            for name in ("tokenize", "tokens", "embed", "sentence-transformers")
        }
        if revision:
            variants["before"] = functools.partial(slope, "embed", before)
        found = rounds(ROUNDS, variants)
    titles = {
        "tokenize": "the tokenizer in a loop",
        "tokens": "headrace, tokens alone, in a loop",
        "embed": "headrace, the whole job, Parquet out",
        "before": f"the same at revision {revision}",
        "sentence-transformers": "sentence-transformers, encode, batch_size=256",
    }
    tokens = tokens_of(folder / f"texts-{SMALL}.jsonl", model)
    report(
        "host-processor",
        "Processor time of a record, next to no network",
        ["work", "µs per record", "x tokenizing"],
        [
            [titles[name], statistics.median(figures), ratio(figures, found["tokenize"])]
            for name, figures in found.items()
        ],
        [
            f"Texts of {tokens:.0f} tokens on average, one thread, one layer of 16 components.",
            f"User and system time of all processes, as the slope between {SMALL:,} and {LARGE:,} texts.",
            f"Medians of {ROUNDS} rounds, the variants in turn; ratios are medians of pairs.",
        ],
    )


def _check(sink: Path, count: int) -> None:
    """Exits unless an output, a file or a folder of files, has each of the ids 0..count-1 once."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json
    import pyarrow.parquet as pq

    files = [sink] if sink.is_file() else [path for path in sink.rglob("*") if path.is_file()]
    read = (lambda path: pq.read_table(path, columns=["id"])) if "parquet" in sink.name else pyarrow.json.read_json
    ids = pa.concat_arrays([part for path in files for part in read(path)["id"].cast(pa.int64()).chunks])
    if (
        len(ids) != count
        or pc.count_distinct(ids).as_py() != count
        or pc.min_max(ids).as_py() != {"min": 0, "max": count - 1}
    ):
        sys.exit(f"{sink}: {len(ids)} rows, {pc.count_distinct(ids).as_py()} ids, of {count} records")


def preparing(folder: Path) -> None:
    """Texts a second of the processes that prepare, one and two of them."""
    if (os.cpu_count() or 1) < max(PREPARING):
        sys.exit("preparing: each process needs a core of its own")
    model = folder / "model"
    _embedding_inputs(folder, model)

    def rate(count: int) -> float:
        command = [sys.executable, "-m", "benchmarks.host_runs", str(count), str(folder / f"texts-{LARGE}.jsonl"), ""]
        found = measure([*command, str(model)], {"PYTHONPATH": f"{folder / 'src'}{os.pathsep}{ROOT}"})
        return LARGE * REPEATS / found.work_s

    found = rounds(ROUNDS, {str(count): functools.partial(rate, count) for count in PREPARING})
    one = found[str(PREPARING[0])]
    tokens = tokens_of(folder / f"texts-{SMALL}.jsonl", model)
    report(
        "host-preparing",
        "Processes that make tokens",
        ["processes", "texts/s", "x one"],
        [[int(count), round(statistics.median(rates)), ratio(rates, one)] for count, rates in found.items()],
        [
            f"Texts of {tokens:.0f} tokens on average in blocks of {SENT:,}, after the processes have seen them once.",
            f"Medians of {ROUNDS} rounds, the variants in turn; the ratio is the median of pairs.",
        ],
    )


def lock(folder: Path) -> None:
    """Time of the embedding job under Python's lock in its driving process, by the slope between two sizes."""
    model = folder / "model"
    _embedding_inputs(folder, model)
    revision, outputs = _given("--before"), itertools.count()

    def slopes(source: Path) -> Counter[str]:
        """µs of a record by module."""
        used = []
        for count in LOCKED:
            command = [sys.executable, "-m", "benchmarks.host_runs", "embed", str(folder / f"texts-{count}.jsonl")]
            command += [str(folder / f"locked-{next(outputs)}.parquet"), str(model)]
            used.append(under_lock(command, {"PYTHONPATH": str(source), **ONE_THREAD}, ROOT))
        small, large = used
        return Counter({name: (large[name] - small[name]) / (LOCKED[1] - LOCKED[0]) * 1e6 for name in {*small, *large}})

    found: dict[str, list[Counter[str]]] = {"now": [], "before": []}
    with checked_out(revision) if revision else nullcontext(folder / "src") as before:
        for _ in range(ROUNDS):
            found["now"].append(slopes(folder / "src"))
            found["before"] += [slopes(before)] if revision else []
    columns = [name for name, rounds_ in found.items() if rounds_]

    def row(title: str, figure: Callable[[Counter[str]], float]) -> list[Any]:
        return [title, *(statistics.median(map(figure, found[name])) for name in columns)]

    modules = Counter[str]()
    for one in itertools.chain(*found.values()):
        modules.update(one)
    rows = [row("the whole job", lambda one: one.total())]
    rows += [row(name, lambda one, name=name: one[name]) for name, _ in modules.most_common(12)]
    title = f"before, {revision}" if revision else ""
    report(
        "host-lock",
        "Time under Python's lock, µs per record",
        ["module at work", *({"now": "now", "before": title}[name] for name in columns)],
        rows,
        [
            f"The embedding job of the table above, looked at {RATE} times a second by py-spy; the slope between",
            f"{LOCKED[0]:,} and {LOCKED[1]:,} texts, imports left out; medians of {ROUNDS} rounds.",
            "The innermost module of Headrace is named.",
        ],
    )


PEER_TITLES = {"ray": "Ray Data", "daft": "Daft", "datatrove": "datatrove, one task"}


def noop(folder: Path) -> None:
    """Records a second with an engine that does nothing, beside peers whose function does the same."""
    peers = _peers()
    titles = {"list": "headrace, an engine of lists", "columns": "headrace, an engine of columns", **peers}
    titles["arrow"] = f"pyarrow alone, in a loop ({importlib.metadata.version('pyarrow')})"
    if only := _given("--peers"):
        del titles["list"]
    rows: list[list[Any]] = []
    outputs = itertools.count()

    def once(name: str, source: Path, kind: str, count: int) -> Measured:
        own = name not in peers
        sink = folder / (f"noop-{next(outputs)}.{kind}" if own else f"noop-{next(outputs)}-{kind}")
        python = [sys.executable, "-m", "benchmarks.host_runs"] if own else [str(PEERS), "-m", "benchmarks.peers.bulk"]
        environment = {"PYTHONPATH": f"{folder / 'src'}{os.pathsep}{ROOT}"} if own else {"PYTHONPATH": str(ROOT)}
        found = measure([*python, name, str(source), str(sink)], environment)
        _check(sink, count)
        return found

    for count in NOOP:
        for source, kind in (("jsonl", "jsonl"), ("jsonl", "parquet"), ("parquet", "parquet")):
            path = _noop_input(folder, source, count)
            found: dict[str, list[Measured]] = {name: [] for name in titles if kind == "parquet" or name != "arrow"}
            for _ in range(ROUNDS):
                for name in found:
                    found[name].append(once(name, path, kind, count))
            best = [one.wall_s for one in found["columns"]]
            rows += [
                [
                    f"{source} to {kind}",
                    f"{count:,}",
                    titles[name],
                    round(count / statistics.median(one.wall_s for one in found[name])),
                    round(count / statistics.median(one.work_s for one in found[name])),
                    ratio([one.wall_s for one in found[name]], best),
                    statistics.median(one.cpu_s for one in found[name]) / count * 1e6,
                    round(max(one.mib for one in found[name])),
                ]
                for name in found
            ]
    report(
        f"host-noop-{only}" if only else "host-noop",
        "A job with an engine that does nothing",
        [
            "job",
            "records",
            "variant",
            "records/s",
            "without imports",
            "x headrace's time",
            "µs of processor",
            "peak MiB",
        ],
        rows,
        [
            f"Medians of {ROUNDS} rounds, the variants in turn; records/s with imports and start-up.",
            "Each row has an id and 85 letters, and gets two numbers. Memory is that of all processes.",
            "All ids were found once in each output.",
            "Headrace syncs and checks each part and goes on after a kill where it was; the others do not.",
            "pyarrow alone is what reading and writing by that library takes, without a job around it.",
        ],
    )


def _noop_input(folder: Path, kind: str, count: int) -> Path:
    path = folder / f"in-{count}.{kind}"
    if not path.exists():
        lines = path.with_suffix(".jsonl")
        write_input(lines, count)
        import pyarrow.json
        import pyarrow.parquet as pq

        pq.write_table(pyarrow.json.read_json(lines), path.with_suffix(".parquet"), row_group_size=65_536)
    return path


def _peers() -> dict[str, str]:
    """Names and versions of the libraries that are there."""
    if not PEERS.exists():
        print(f"no other libraries: {PEERS} is not there (scripts/install-peers makes it)", file=sys.stderr)
        return {}
    only = (_given("--peers") or ",".join(PEER_TITLES)).split(",")
    wanted = {name: title for name, title in PEER_TITLES.items() if name in only}
    ask = "from importlib.metadata import version\n" + "\n".join(f"print(version({name!r}))" for name in wanted)
    versions = subprocess.run([str(PEERS), "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    return {name: f"{title} ({at})" for (name, title), at in zip(wanted.items(), versions, strict=True)}


def main() -> None:
    """The tables that are named, or all."""
    known = {table.__name__: table for table in (processor, preparing, lock, noop)}
    values = {_given(flag) for flag in ("--before", "--rounds", "--records", "--peers")}
    given = [word for word in sys.argv[1:] if not word.startswith("--") and word not in values]
    if not known.keys() >= set(given):
        sys.exit(f"usage: python -m benchmarks.host [--quick] [--before REVISION] [{' | '.join(known)} ...]")
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(ROOT / "src", source := Path(name) / "src")  # the tree may change meanwhile
        compileall.compile_dir(source, quiet=1)  # as an installed package is
        for table in given or known:
            known[table](Path(name))


if __name__ == "__main__":
    main()
