"""What tuning found is kept, and nothing that is wrong with its files does harm."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from headrace.device.cache import TuningCache, cache_folder, cpu_facts

KEY = {"model_digest": "abc", "threads": 2}


def test_what_was_found_is_there_for_the_same_key_alone(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "new" / "folder")
    assert cache.read(KEY) is None
    cache.write(KEY, {"budget": 2048})
    assert cache.read(KEY) == {"budget": 2048}
    assert cache.read({**KEY, "threads": 1}) is None
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": 1}', "damaged"),
        ('{"format": 1, "key": {}, "found": {}}', "it belongs to another key"),
        ('{"format": 99, "key": {}, "found": {}}', "another version"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_and_said(
    tmp_path: Path, content: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TuningCache(tmp_path)
    cache.write(KEY, {"budget": 1})
    [path] = tmp_path.iterdir()
    path.write_text(content)
    assert cache.read(KEY) is None
    assert said in caplog.text and str(path) in caplog.text
    cache.write(KEY, {"budget": 2})
    assert cache.read(KEY) == {"budget": 2}


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / "file")
    cache.write(KEY, {"budget": 1})
    assert cache.read(KEY) is None


def test_what_cannot_be_stored_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    cache.write(KEY, {"budget": 1})
    [path] = tmp_path.iterdir()
    path.unlink()
    path.mkdir()  # nothing can take its place
    cache.write(KEY, {"budget": 2})
    assert list(tmp_path.iterdir()) == [path]


def test_readers_never_see_half_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = TuningCache(tmp_path)
    cache.write(KEY, {"budget": 0})
    ended = threading.Event()

    def write() -> None:
        for number in range(200):
            cache.write(KEY, {"budget": number, "filling": "x" * 10_000})
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not ended.is_set():
        assert cache.read(KEY) is not None
    writer.join()
    assert not caplog.text


def test_the_folder_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "headrace" / "tuning"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == Path.home() / ".cache" / "headrace" / "tuning"


def test_instructions_switched_off_are_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16\n")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    before = cpu_facts(cpuinfo)
    assert (before["cpu"], before["instructions"]) == ("Some CPU", ["avx2", "amx_bf16"])
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert cpu_facts(cpuinfo) != before
    assert json.dumps(cpu_facts(tmp_path / "none"))
