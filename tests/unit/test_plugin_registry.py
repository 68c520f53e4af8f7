"""The registry of plugins: what it says where Headrace itself is not installed."""

from __future__ import annotations

import pytest

from headrace import plugins as registry
from headrace.errors import ConfigError
from headrace.plugins import known


def test_sources_without_an_installed_package_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.metadata, "distributions", lambda: iter(()))
    registry.forget()
    try:
        with pytest.raises(ConfigError, match=r"formats are not registered.*pip install"):
            known("formats")
    finally:
        monkeypatch.undo()
        registry.forget()
    assert "jsonl" in known("formats")
