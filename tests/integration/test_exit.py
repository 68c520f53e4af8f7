"""A script that ends with an exception while a model works: Python must not abort."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.acceptance.command import python, traced

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
def test_an_exception_ends_a_script_while_a_model_works(script: str, tmp_path: Path) -> None:
    with traced(python(script + END, ["script"], folder=tmp_path, imported="torch")) as program:
        output, errors = program.communicate()
    assert errors.rstrip().endswith("ValueError: of the script"), errors
    assert (program.returncode, output) == (1, "computed\n")
