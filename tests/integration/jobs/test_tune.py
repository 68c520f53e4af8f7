"""`headrace tune`: the curve of a model on one's own records, as a table and a picture."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import ROOT, headrace

from headrace.app.grid import Grid, GridOptions, GridRow, Setting, measure
from headrace.app.jobs.job import JobSettings
from headrace.app.step_grid import measure_steps
from headrace.cli.curve import check_picture, draw, draw_steps
from headrace.cli.tune import GridFlags, as_lines, step_lines
from headrace.device.budget import Measured
from headrace.device.step_sizes import StepSize
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import options_by_task
from headrace.engines.generation import paging
from headrace.engines.networks import pytorch as torch_network
from headrace.errors import ConfigError, MissingExtraError
from headrace.wording import flag_of

WORDS = "the canal feeds a mill and its wheel turns so that water never stands still".split()  # noqa: SIM905


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    rows = [{"id": str(n), "text": " ".join(WORDS[: n % len(WORDS) + 1])} for n in range(200)]
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(docs: Path, folder: Path, **more: Any) -> JobSettings:
    return JobSettings(docs, lambda rows: None, EngineConfig("embed", str(folder), **more))


def row(budget: int, rate: float, dtype: str = "float32", *, passes: bool = True) -> GridRow:
    measured = Measured(budget, rate, budget / rate, 0.05, 500_000_000 + budget)
    return GridRow(Setting("torch", dtype, None), measured, rate / 50, "" if passes else "cosine >= 0.9", passes)


def test_a_language_model_is_measured_by_the_size_of_its_steps(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"id": n, "text": f"{n}+{n}="}) + "\n" for n in range(30)))
    monkeypatch.setitem(paging._START, "cpu", StepSize(4, 64))
    monkeypatch.setitem(paging._MOST, "cpu", StepSize(8, 128))
    given = JobSettings(sums, lambda rows: None, EngineConfig("generate"))
    grid = measure_steps(given, 60)
    sizes = [(row.size.answers, row.size.tokens) for row in grid.rows]
    best, fastest = grid.chosen.size, max(grid.rows, key=lambda row: row.records_per_s)
    widest = max((row for row in grid.rows if row.size.tokens == 128), key=lambda row: row.records_per_s).size.answers
    assert set(sizes) == {(1, 128), (2, 128), (4, 128), (8, 128)} | {(widest, n) for n in (16, 32, 64, 128)}
    assert best == fastest.size or best == StepSize(8, 128), "which a job takes unless told otherwise"
    assert grid.chosen.records_per_s >= 0.97 * fastest.records_per_s
    assert all(row.tokens_per_s > 4 * row.records_per_s > 0 and row.step_s > 0 for row in grid.rows)
    kept = [json.loads(one.read_text())["found"] for one in (own_cache / "headrace" / "tuning").glob("*.json")]
    assert {"step_answers": best.answers, "step_tokens": best.tokens} in kept
    lines = step_lines(grid)
    assert len(lines) == len(grid.rows) + 4
    assert lines[-2] == f"chosen: --max-num-seqs {best.answers} --max-num-batched-tokens {best.tokens}"
    draw_steps(grid, tmp_path / "curve.svg")
    assert "answers in a step" in (tmp_path / "curve.svg").read_text()
    assert len(measure_steps(given, 1e-9).rows) == 2, "the time was up"
    fixed = JobSettings(
        sums, lambda rows: None,
        EngineConfig("generate", engine_options={"max_num_seqs": 2, "max_num_batched_tokens": 9}),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="max_num_seqs"):
        measure_steps(fixed, 1)


def test_every_setting_is_measured_and_the_best_kept(
    docs: Path, encoder_folder: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    def measured(device: object) -> Mapping[str, float]:
        return {"bfloat16": 4.0}

    monkeypatch.setattr(torch_network, "speeds", measured)
    monkeypatch.setattr(torch_network, "LEAST_PARAMETERS", 0)
    told: list[str] = []
    options = GridOptions(budgets=(64, 256), threads=(1, 2), seconds=0.5)
    grid = measure(settings(docs, encoder_folder), options, told.append)
    settings_met = {(one.setting.dtype, one.setting.threads, one.measured.budget) for one in grid.rows}
    assert settings_met == {(d, t, b) for d in ("float32", "bfloat16") for t in (1, 2) for b in (64, 256)}
    assert told == ["loading torch in float32 ...", "loading torch in bfloat16 ..."]
    assert grid.chosen in grid.rows
    for one in grid.rows:
        assert one.measured.cost_per_s > 0 and 0 <= one.measured.padding < 1
        assert one.off == "" if one.setting.dtype == "float32" else "cosine >= 0.99" in one.off
    for one in (own_cache / "headrace" / "tuning").glob("*.json"):
        one.unlink()
    alone = measure(settings(docs, encoder_folder), GridOptions((64,), ("float32",), seconds=0.1), told.append)
    assert [one.measured.budget for one in alone.rows] == [64]
    kept = list((own_cache / "headrace" / "tuning").glob("*.json"))
    assert any(json.loads(one.read_text())["found"].get("budget") == 64 for one in kept)


def test_the_table_marks_the_best_and_says_what_batching_gains() -> None:
    rows = (row(512, 800), row(1024, 1000), row(2048, 1010), row(1024, 5000, "bfloat16", passes=False))
    lines = as_lines(Grid(rows, rows[1], 0.010, 0.026, "Some CPU, avx2"))
    assert [line for line in lines if "<- chosen" in line] == [lines[2]]
    assert "fails: cosine >= 0.9" in lines[4]
    assert "32 inputs take 2.6 times as long as one: 12 times the throughput." in lines
    assert "chosen: --batch-tokens 1024 --dtype float32" in lines
    int8 = row(2048, 9000, "int8")
    assert "chosen: --batch-tokens 2048 --quantize int8" in as_lines(Grid((int8,), int8, 0.01, 0.02, "Some CPU"))
    assert GridFlags().options(EngineConfig("embed", engine_options={"quantize": "int8"})).dtypes == ("float32", "int8")


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_picture_shows_every_setting(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    rows = (row(512, 800), row(1024, 1000), row(512, 1600, "bfloat16"))
    path = tmp_path / f"curve{suffix}"
    draw(Grid(rows, rows[2], 0.01, 0.02, "Some CPU"), path)
    if suffix == ".svg":
        text = path.read_text()
        for label in ("torch float32", "torch bfloat16", "tokens/s", "ms per batch", "peak memory, MB", "padding, %"):
            assert label in text
    else:
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_picture_that_cannot_be_drawn_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        check_picture(tmp_path / "curve.pdf")
    with pytest.raises(ConfigError, match=r"there is no folder .*none; create it"):
        check_picture(tmp_path / "none" / "curve.svg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "headrace\[plot\]"'):
        check_picture(tmp_path / "curve.svg")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--budgets", "12,x"), "--budgets 12,x: 'x' is not a whole number"),
        (("--plot", "curve.pdf"), "must end in .svg or .png"),
        (("--task", "generate", "--engine", "static"), "has no steps to tune"),
        (("--dtypes", "float8"), "dtype 'float8' is unknown; it may be auto, float32, float16, bfloat16"),
        (("--batch_tokens", "5"), "--batch_tokens: task 'embed' has no such option"),
    ],
)
def test_bad_input_is_one_line(docs: Path, flags: tuple[str, ...], said: str) -> None:
    status, output = headrace("tune", "-i", str(docs), *flags, folder=docs.parent)
    assert status == 2
    assert said in output.splitlines()[-1]
    assert "Traceback" not in output


def test_every_flag_the_page_names_is_one() -> None:
    import typer

    from headrace.cli.app import VERBS, app

    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    group = typer.main.get_command(app)
    commands = [group.get_command(None, name) for name in VERBS]  # type: ignore[attr-defined]
    known = {name for command in commands for parameter in command.params for name in parameter.opts}
    known |= {flag_of(option) for engines in options_by_task().values() for own in engines.values() for option in own}
    assert set(re.findall(r"`(--[a-z-]+)", page)) <= known


def test_the_page_has_table_and_picture() -> None:
    compare(ROOT / "docs" / "tuning.md", ROOT / "docs" / "images")
    assert "torch bfloat16" in (ROOT / "docs" / "images" / "tune.svg").read_text()


@pytest.mark.thorough
def test_the_script_puts_table_and_picture_into_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "images").mkdir()
    page = tmp_path / "tuning.md"
    page.write_text((ROOT / "docs" / "tuning.md").read_text(encoding="utf-8"))
    flags = ("--budgets", "256,512", "--dtypes", "float32", "--seconds", "0.1")
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "tune_picture.py", "--docs", tmp_path, "--records", "12", "--", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    compare(page, tmp_path / "images")


def compare(page: Path, picture: Path) -> None:
    """Raise AssertionError if the picture does not show what the table has."""
    [table] = re.findall(r"<!-- scripts/tune_picture.py -->\n```\n(.*?)\n```", page.read_text(), re.DOTALL)
    lines = table.splitlines()
    assert " ".join(lines[0].split()).endswith("budget tokens/s records/s ms/batch padding peak MB")
    assert sum("<- chosen" in line for line in lines) == 1
    assert re.fullmatch(r"32 inputs take [\d.]+ times as long as one: \d+ times the throughput\.", lines[-3])
    drawn = (picture / "tune.svg").read_text()
    for engine, dtype in {tuple(line.split()[:2]) for line in lines[1:] if line.startswith((" torch", "torch"))}:
        assert f"{engine} {dtype}" in drawn
