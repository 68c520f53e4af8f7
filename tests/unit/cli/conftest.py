"""The command's own functions, called as the command calls them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.wording import speak


@pytest.fixture(autouse=True)
def _messages_name_flags() -> Iterator[None]:
    speak("flags")
    yield
    speak("python")
