"""A script that ends with an exception while a model works: Python must not abort."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORK = """
import asyncio, threading, time, headrace, torch
from headrace.device.cpu_lanes import cpu_lanes
torch.set_num_threads(2)
begun, table = threading.Event(), torch.ones(200, 200)
def work(records):
    begun.set()
    ends = time.monotonic() + 0.7
    while time.monotonic() < ends: table @ table
    print("computed")
    return records
"""
LANES = WORK + "call = lambda: cpu_lanes().map(work, [0])"
BATCHER = (
    WORK
    + """
async def submit():
    async with headrace.DynamicBatcher(work) as batcher:
        await batcher.submit(1)
call = lambda: asyncio.run(submit())
"""
)
END = """
threading.Thread(target=call, daemon=True).start()
begun.wait()
raise ValueError("of the script")
"""


@pytest.mark.parametrize("script", [LANES, BATCHER], ids=["lanes", "batcher"])
def test_an_exception_ends_a_script_while_a_model_works(script: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", script + END], check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.stderr.rstrip().endswith("ValueError: of the script"), ended.stderr
    assert (ended.returncode, ended.stdout) == (1, "computed\n")
