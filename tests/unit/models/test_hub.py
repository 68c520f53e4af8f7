"""What failures of the disk and of the library mean to the user."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from headrace.errors import EngineError, MissingExtraError
from headrace.models.hub import HubModel

MODEL = HubModel("org/name", "org/name", None)
COMMIT = "a" * 40


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk of .* is full; free some space, or set HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "cannot write the cache: .*set HF_HOME"),
        (OSError("Consistency check failed\nmore"), "the download failed: Consistency check failed; complete files"),
    ],
)
def test_a_failed_download_names_the_way_out(
    error: OSError, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EngineError, match=f"model 'org/name'.*{words}"):
        MODEL.download(COMMIT, ["config.json"])


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        MissingExtraError, match=r'huggingface_hub, which is not installed: pip install "headrace\[torch\]"'
    ):
        MODEL.look_up()
