"""Tests and figures of a GPU, in one command of at most 9 minutes: each part in a process of its own, with a limit.

python -m benchmarks.gpu                             # all parts, with real shapes in bfloat16
python -m benchmarks.gpu --only device,bert,small
python -m benchmarks.gpu --device cpu --tiny         # the same with tiny shapes: a test, not a measurement
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, report

TOTAL_S = 525.0
"""Of all parts: the machine may be lent for ten minutes."""
LEAST_S = 20.0
"""A part does not begin with less."""
_TESTS = {"device": "tests/gpu/test_device.py", "contract": "tests/gpu"}


@dataclass(frozen=True, slots=True)
class Part:
    """A process."""

    seconds: float
    """Its limit."""
    needs: tuple[str, ...] = ("torch", "transformers", "sentence_transformers")


PARTS: Mapping[str, Part] = {
    "device": Part(60, ("torch", "sentence_transformers", "pytest")),
    "long": Part(45),
    "bert": Part(80),
    "qwen": Part(120, ("torch", "transformers")),
    "job": Part(45),
    "contract": Part(60, ("torch", "sentence_transformers", "pytest")),
    "vit": Part(70, ("torch", "transformers", "PIL")),
    "small": Part(30),
    "vllm": Part(150, ("torch", "vllm")),
}
"""In order of worth: what comes last is cut off where time is short."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that is wanted."""

    name: str
    part: str
    figure: Callable[[Sequence[Mapping[str, Any]]], float]
    """Of the part's rows."""
    least: float


def _ours(name: str) -> Callable[[Sequence[Mapping[str, Any]]], float]:
    return lambda rows: float(rows[0][name])


def _slower(start: str) -> Callable[[Sequence[Mapping[str, Any]]], float]:
    """How many times as fast headrace is as the fastest of the others whose name begins so."""
    return lambda rows: min(float(row["slower"]) for row in rows if row["variant"].startswith(start))


def _named(rows: Sequence[Mapping[str, Any]], end: str) -> Mapping[str, Any]:
    return next(row for row in rows if row["variant"].endswith(end))


GOALS = (
    Goal("BERT-base, real lengths: tokens/s", "bert", _ours("per_second"), 2.5e6),
    Goal("BERT-base: x sentence-transformers' best", "bert", _slower("sentence"), 3.0),
    Goal("BERT-base at 512 tokens: MFU", "long", _ours("mfu"), 0.55),
    Goal("batches of 8: graphs x eager", "small", _slower("headrace, eager"), 1.05),
    Goal("ViT-B/16 from JPEG: device busy", "vit", _ours("busy"), 0.95),
    Goal("Qwen2.5-7B shape: answer tokens/s", "qwen", _ours("per_second"), 8_000.0),
    Goal("ViT-B/16: x the plain loop", "vit", lambda rows: float(_named(rows, "one by one")["slower"]), 5.0),
    Goal("Qwen2.5-7B shape: continuous x static", "qwen", _slower("transformers"), 3.0),
)


def main() -> None:
    """Run what was asked for; exit status 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in float32, one round, no JSON")
    parser.add_argument("--only", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = [name.strip() for name in given.only.split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"--only: there is no part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    if given.part:
        run_part(given.part, given.device, given.tiny, given.seconds)
        return
    where = _device(given.device, given.tiny)
    ends = time.monotonic() + TOTAL_S
    found = {name: _started(name, given, ends) for name in names}
    _tell(where, found, given.tiny)
    if any(one["state"] not in ("ok", "skipped") for one in found.values()):
        sys.exit(1)


def _device(device: str, tiny: bool) -> str:
    """The device's name. Exits if it is not there."""
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no torch: set PYTHON to the interpreter that has")
    import torch

    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            sys.exit("PyTorch sees no CUDA device; --device cpu --tiny shows that the script works")
        return str(torch.cuda.get_device_name(device))
    if not tiny:
        sys.exit(f"--device {device} needs --tiny: the real shapes take hours there")
    return "the CPU, tiny shapes: no figures to quote"


def _started(name: str, given: argparse.Namespace, ends: float) -> dict[str, Any]:
    """Run a part in its own process; what it returned, or why it did not."""
    part, started = PARTS[name], time.monotonic()
    limit = min(part.seconds, ends - started)
    if missing := [one for one in part.needs if importlib.util.find_spec(one) is None]:
        return {"state": f"not run: {', '.join(missing)} is not installed", "seconds": 0.0}
    if limit < LEAST_S:
        return {"state": "not run: no time left", "seconds": 0.0}
    print(f"\n--- {name} (at most {limit:.0f} s)", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", given.device]
    command += ["--seconds", str(limit - 10)] + ["--tiny"] * given.tiny
    found: dict[str, Any] = {"rows": [], "figures": {}}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    stop = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    stop.start()
    try:
        for line in process.stdout or ():
            _heard(line, found, None if given.tiny else RESULTS / "gpu-rows.jsonl")
        status = process.wait()
    finally:
        stop.cancel()
    took = time.monotonic() - started
    late = status == -signal.SIGKILL and took >= limit
    state = f"stopped after {limit:.0f} s" if late else f"failed with status {status}"
    return {"state": state, **found, "seconds": took}


def _heard(line: str, found: dict[str, Any], file: Path | None) -> None:
    """Take what a part says: a row or a figure, which is printed and saved at once, its end, or words."""
    try:
        kind, value = json.loads(line)
    except (ValueError, TypeError):
        print(line, end="", flush=True)
        return
    if kind == "row":
        found["rows"].append(value)
    elif kind == "figure":
        found["figures"].update(value)
    else:
        found["state"] = value
    print("   ", kind, value, flush=True)
    if file is not None:
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as saved:
            saved.write(line)


def _say(kind: str, value: object) -> None:
    print(json.dumps([kind, value]), flush=True)


def run_part(name: str, device: str, tiny: bool, seconds: float) -> None:
    """Say the rows and figures of a part, in this process."""
    if name in _TESTS:
        _tests(name)
        return
    import torch

    from benchmarks.gpu_contests import CONTESTS, Setting, job, matrix_peak, measure

    ends = time.monotonic() + seconds
    numbers = torch.float32 if tiny else torch.bfloat16
    peak = matrix_peak(device, 512 if tiny else 8192, numbers)
    with tempfile.TemporaryDirectory(dir=_roomy()) as folder:
        setting = Setting(device, tiny, Path(folder), peak, ends)
        _say("figure", {"matrix peak, TFLOP/s": peak / 1e12})
        if name == "job":
            rows, figures = job(setting)
            for row in rows:
                _say("row", asdict(row))
            _say("figure", dict(figures))
        else:
            measure(CONTESTS[name](setting), setting, lambda row: _say("row", asdict(row)))
    _say("state", "ok")


def _tests(name: str) -> None:
    """Say the tests' outcome; pytest prints what failed, test by test."""
    left_out = [] if name == "device" else [f"--ignore={_TESTS['device']}"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(os.cpu_count() or 1, 8) if name == "contract" else 0)]
    command += [_TESTS[name], *left_out]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in process.stdout or ():
        print(line, end="", flush=True)
        last = line if line.strip() else last
    count = dict(reversed(pair.split(" ")) for pair in re.findall(r"\d+ (?:passed|failed|skipped|error)", last))
    _say("figure", {f"tests {kind}": int(number) for kind, number in count.items()})
    if process.wait():
        _say("state", f"failed: {count.get('failed', 0)} of {sum(map(int, count.values()))} tests")
    else:
        _say("state", "ok" if "passed" in count else "skipped")


def _roomy() -> str | None:
    """A folder in memory, if there is room for the largest model; None for the usual place."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 40 << 30 else None


def _tell(where: str, found: Mapping[str, Mapping[str, Any]], tiny: bool) -> None:
    """Print what was measured and what was wanted; write it as JSON named after the device."""
    table: list[list[Any]] = []
    for part, one in found.items():
        for row in one.get("rows", []):
            busy = "-" if row["busy"] is None else row["busy"]
            table.append(
                [part, row["model"], row["variant"], row["unit"], row["per_second"], row["slower"], busy, row["mfu"]]
            )
        for name, figure in one.get("figures", {}).items():
            table.append([part, name, "", "", figure, "", "", ""])
        table.append([part, one["state"], "", "", "", "", "", f"{one['seconds']:.0f} s"])
    for goal in () if tiny else GOALS:
        rows = found.get(goal.part, {}).get("rows")
        figure = goal.figure(rows) if rows else None
        reached = "not measured" if figure is None else "reached" if figure >= goal.least else "short"
        table.append(["goal", goal.name, f"at least {goal.least:,g}", "", figure or "-", "", "", reached])
    slug = re.sub(r"[^a-z0-9]+", "-", where.lower()).strip("-")
    report(
        None if tiny else f"gpu-{slug}",
        f"Random weights on {where}",
        ["part", "model", "variant", "unit", "per second", "headrace is x times as fast", "device busy", "MFU"],
        table,
        [
            "Tokens are those of the texts, padding not counted; MFU is the share of the matrix peak measured here.",
            "Medians of up to 3 rounds, one variant after the other, each on as many inputs as its time allows.",
        ],
    )


if __name__ == "__main__":
    main()
