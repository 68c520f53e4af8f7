"""Headless Chromium, driven over a pipe in its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_LIMIT_S = 60.0


class Browser:
    """One page in Chromium, which reaches this machine alone. A context manager.

    Args:
        folder: for its profile.
        dark: prefer dark colours.
    """

    def __init__(self, folder: Path, *, dark: bool = False) -> None:
        assert CHROMIUM is not None
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--disable-background-networking", f"--user-data-dir={folder}", "--remote-debugging-pipe",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        ]  # fmt: skip
        shell = f'exec 3<&{commands} 4>&{answers}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, *flags, "about:blank"],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        """Errors and messages of the page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: object) -> Any:
        """The result of one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = os.read(self._in, 1 << 20)
            assert block, "Chromium has ended"
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"method": "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded", "params": said}:
                self.console.append(json.dumps(said)[:2000])

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, done: Callable[[Any], bool] = bool) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + _LIMIT_S
        while not done(found := self.evaluate(script)):
            assert time.monotonic() < end, f"{script} is still {found!r}; console: {self.console}"
            time.sleep(0.05)
        return found

    def picture(self, path: Path, width: int, height: int) -> None:
        """Write what is seen of the page to a PNG file."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(0.3)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
