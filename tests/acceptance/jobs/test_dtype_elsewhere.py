"""Where the instructions for bfloat16 are off, a job that `--dtype auto` began in it goes on in it or says why not.

`ONEDNN_MAX_CPU_ISA` switches them off, so that one machine stands for two. How fast they are is set, not measured: that
differs from CPU to CPU, and with what else runs there.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.acceptance.command import end, headrace, start
from tests.small_models import text_model
from tests.waiting import until

RECORDS = 1_500
WORDS = "the canal feeds a mill and its wheel turns so that water never stands still".split()  # noqa: SIM905
EAGER = "from headrace.app.jobs import tuning; tuning.WORTH_S = tuning.LEAST_GAIN = 0.0; "
"""Lets a short job try bfloat16, and take it however small the gain is with a small model."""
FOUND = "from headrace.engines.networks import pytorch; pytorch.speeds = lambda device, own='': {{'bfloat16': {}}}; "
"""How many times as fast as float32 bfloat16 is found to be."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records, and a model just large enough to be tried in bfloat16."""
    text_model(tmp_path / "model", head=False, hidden_size=256, initializer_range=0.02)
    with (tmp_path / "in.jsonl").open("w") as file:
        for n in range(RECORDS):
            text = " ".join(WORDS[(n + place) % len(WORDS)] for place in range(10 + n % 60))
            file.write(json.dumps({"id": str(n), "text": text}) + "\n")
    return tmp_path


def begin(folder: Path, output: str, speed: float, isa: str | None = None) -> subprocess.Popen[str]:
    """Begin or continue the job on a CPU of this speed in bfloat16, with instructions limited to `isa`."""
    instructions = {"ONEDNN_MAX_CPU_ISA": isa} if isa else {}
    command = ("run", "-i", "in.jsonl", "-o", output, "--model", "model")
    return start(*command, folder=folder, before=EAGER + FOUND.format(speed), **instructions)


def vectors(output: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == [str(n) for n in range(RECORDS)]  # each once, in order
    return np.array([row["embedding"] for row in rows])


@pytest.mark.thorough  # tests/integration/jobs/test_precision.py has each of its steps in one process
def test_a_killed_job_keeps_its_numbers_or_says_why_not(folder: Path) -> None:
    job = begin(folder, "out.jsonl", 4.0)
    until(lambda: any(folder.glob("out.jsonl.parts/part-*")), of=job)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    state = json.loads((folder / "out.jsonl.parts" / "job.json").read_text())
    assert state["fingerprint"]["engine"]["dtype"] == "bfloat16"
    parts = sorted(path.name for path in folder.glob("out.jsonl.parts/part-*"))

    status, said = end(begin(folder, "out.jsonl", 0.2, "AVX2"))
    assert status == 2
    assert "was started in bfloat16, which this machine computes at 0.2 times the speed of float32" in said
    assert "pass --dtype bfloat16 to continue here nevertheless" in said
    assert sorted(path.name for path in folder.glob("out.jsonl.parts/part-*")) == parts

    status, said = end(begin(folder, "out.jsonl", 0.5, "AVX512_CORE"))  # converts the numbers, which is less slow
    assert status == 0, said
    assert "the job runs in bfloat16: this device computes it at 0.5 times" in said
    assert "bfloat16: as when the job was started; this device computes it at 0.5 times" in said
    for name, dtype in (("exact", "float32"), ("whole", "bfloat16")):
        command = ("run", "-i", "in.jsonl", "-o", f"{name}.jsonl", "--model", "model", "--dtype", dtype)
        assert headrace(*command, folder=folder)[0] == 0
    found, exact, whole = (vectors(folder / f"{name}.jsonl") for name in ("out", "exact", "whole"))
    cosines = [
        (found * other).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(other, axis=1)
        for other in (whole, exact)
    ]
    assert cosines[0].min() > 0.999
    assert np.median(1 - cosines[0]) < np.median(1 - cosines[1])  # nearer to bfloat16's numbers than to float32's
