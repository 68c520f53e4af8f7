"""Time under Python's lock, by py-spy: which code held it, in processor seconds.

py-spy looks at wall time. A thread that holds the lock may wait for a core meanwhile, so what it sees is multiplied by
the share of the time in which the process's runnable threads had a core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

RATE = 500
"""Looks a second."""
PY_SPY = Path(sys.executable).with_name("py-spy")
OTHERS = "elsewhere: start-up, libraries"


def under_lock(command: Sequence[str], environment: dict[str, str], cwd: Path) -> Counter[str]:
    """Run a command under py-spy; the seconds by the innermost module of Headrace at work. Exits if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "looks"
        spy = [str(PY_SPY), "record", "--gil", "--nonblocking", "--rate", str(RATE), "--format", "raw"]
        spy += ["--full-filenames", "--output", str(target), "--", *command]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(spy, stdout=said, stderr=said, cwd=cwd, env={**os.environ, **environment})
            on_core = _share_on_core(process)
            said.seek(0)
            if process.returncode or not target.exists():
                sys.exit(f"{' '.join(spy)} ended with status {process.returncode}:\n{said.read()[-4000:]}")
        found: Counter[str] = Counter()
        for line in target.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            found[_module(stack)] += int(count)
    return Counter({module: count / RATE * on_core for module, count in found.items()})


def _module(stack: str) -> str:
    """The innermost frame's module of Headrace or of the benchmark."""
    for frame in reversed(stack.split(";")):
        for mark in ("/src/headrace/", "/benchmarks/"):
            if mark in frame:
                return frame.partition(mark)[2].rpartition(":")[0] if mark != "/benchmarks/" else "the benchmark"
    return OTHERS


def _share_on_core(process: subprocess.Popen[str]) -> float:
    """Wait for py-spy; which share of the time its program's threads were on a core, of that in which they could be."""
    threads: dict[str, tuple[int, int]] = {}
    while process.poll() is None:
        for program in _children(process.pid):
            for path in Path(f"/proc/{program}/task").glob("*/schedstat"):
                try:
                    ran, waited, _ = map(int, path.read_text().split())
                except (OSError, ValueError):  # it has ended
                    continue
                threads[str(path)] = ran, waited
        time.sleep(0.1)
    ran, waited = (sum(times) for times in zip(*threads.values(), strict=True))
    return ran / (ran + waited)


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


_LOAD = """
import hashlib, pathlib, sys, threading, time
data = bytes(10_000_000)
def hashes():
    for _ in range(500): hashlib.sha256(data)
def loops():
    for _ in range(50_000_000): pass
    pathlib.Path(sys.argv[1]).write_text(str(time.thread_time()))
threads = [threading.Thread(target=globals()[name]) for name in sys.argv[2:]]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def main() -> None:
    """Look at loads that are known: `python -m benchmarks.host_lock`. Hashing large data does not hold the lock."""
    with tempfile.TemporaryDirectory() as folder:
        for names in (["hashes"], ["loops"], ["hashes", "loops"]):
            times = Path(folder) / "times"
            times.write_text("0")
            found = under_lock([sys.executable, "-c", _LOAD, str(times), *names], {}, Path.cwd())
            known = float(times.read_text())
            print(f"{' and '.join(names)}: {found.total():.2f} s under the lock, of {known:.2f} s known")


if __name__ == "__main__":
    main()
