"""The comparison, with stand-ins for the contenders: one for each way to go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import until

from headrace.app import bench
from headrace.app.bench import BenchSettings, compare, read_texts
from headrace.cli.bench import as_lines
from headrace.errors import ConfigError
from headrace.observe.page.bench import render_comparison

HOSTILE = "</script><b>{{7*7}}"
STAND_IN = """
import json, os, sys, time
request = json.load(open(sys.argv[1]))
name = request["contender"]
if name == "vllm": os.kill(os.getpid(), 11)
if name == "ray data": time.sleep(60)
if name == "flyte": sys.exit("no </script> memory")
with open(request["results"], "w") as file:
    for size in request["sizes"]:
        seconds = {None: 4.0, 8: 2.0, 32: 3.0}[size] * (2 if name == "sentence-transformers" else 1)
        outputs = [[1.0, 0.0 if name == "sentence-transformers" else 0.5]] * len(request["texts"])
        found = {"size": size, "error": "OutOfMemoryError: too large"} if size == 32 else {
            "size": size, "seconds": seconds, "outputs": outputs}
        file.write(json.dumps(found) + "\\n")
"""


def test_each_contender_has_its_rows_whatever_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN)
    monkeypatch.setattr(bench, "CONTENDER_COMMAND", (sys.executable, "-S", str(stand_in)))
    names = ["headrace", "sentence-transformers", "vllm", "ray data", "flyte"]
    said: list[str] = []
    found = compare(BenchSettings("embed", "folder", HOSTILE, ["a text"] * 8, names, (8, 32), 2, 2.0), said.append)
    rows = {(row.contender, row.setting): row for row in found.rows}
    ours, theirs = rows["headrace", "batch size 8"], rows["sentence-transformers", "default"]
    assert (ours.records_per_s, len(ours.rounds), ours.headrace_is) == (4.0, 2, 1.0)
    assert (theirs.records_per_s, theirs.headrace_is) == (1.0, 4.0)
    assert found.reference == "sentence-transformers"
    assert ours.differs and ours.agreement == pytest.approx(0.894, abs=0.001)
    assert ours.error == "batch size 32: OutOfMemoryError: too large"
    assert rows["vllm", "default"].error == "its process died of SIGSEGV"
    assert rows["ray data", "default"].error == "it took longer than 2 s and was stopped (--timeout)"
    assert rows["flyte", "default"].error == "no </script> memory"
    assert said.count("round 2 of 2: vllm ...") == 0, "what failed is not tried again"
    assert any("different answers" in line for line in as_lines(found))
    page = render_comparison(json.loads(found.as_json()))
    assert HOSTILE not in page and "no </script> memory" not in page
    assert "&lt;/script&gt;&lt;b&gt;{{7*7}}" in page


STUCK = """
import os, pathlib, sys, time
from headrace.app import bench_contender as own
def stuck(request):
    pathlib.Path(sys.argv[0]).with_name("pid").write_text(str(os.getpid()))
    time.sleep(60)
own.CONTENDERS["headrace"] = own.Contender(stuck, "headrace")
own.main()
"""
COMMAND = """
import sys
from headrace.app import bench
from headrace.cli.app import app
bench.CONTENDER_COMMAND = (sys.executable, sys.argv.pop(1))
app()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_contender_ends_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", COMMAND, str(tmp_path / "stuck.py"), "bench", "-i", str(tmp_path / "in.jsonl")]
    options = ["--contenders", "headrace", "-o", str(tmp_path / "page.html")]
    with subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as own:
        until(lambda: pid.exists() and pid.read_text(), of=own)
        own.send_signal(number)
        _, said = own.communicate(timeout=60)
    assert own.returncode == (-9 if number == signal.SIGKILL else 128 + number), said
    assert b"Traceback" not in said
    until(lambda: not Path("/proc", pid.read_text()).exists())
    assert number == signal.SIGKILL or not list(tmp_path.glob("headrace-bench-*"))


def test_texts_are_read_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in ("a", "", None, "b", "c")))
    assert read_texts(str(tmp_path / "in.jsonl"), "body", 2) == ["a", "b"]
    with pytest.raises(ConfigError, match="no text in the column 'text'; its columns are body"):
        read_texts(str(tmp_path / "in.jsonl"), "text", 2)
