"""What the server does now: one frame a second while there are viewers, shared by all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.errors import HeadraceError, MissingExtraError
from headrace.serving.errors import ApiError

INTERVAL_S = 1.0
MOST_VIEWERS = 512
_REPORT_S = 5.0


class DashboardPage(Protocol):
    @property
    def content(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]: ...


class Observed(Protocol):
    """What shows itself: a server or a job."""

    @property
    def page(self) -> DashboardPage:
        """The dashboard. It holds no figures: its script reads them."""
        ...

    def frame(self) -> tuple[bytes, bool]:
        """The present state as JSON, and whether it holds rates."""
        ...

    def report(self) -> str:
        """The report as an HTML page. Blocks.

        Raises:
            MissingExtraError: what draws it is not installed.
            HeadraceError: there is none yet.
        """
        ...


class LiveState:
    """Makes frames, and shares them.

    Args:
        going: whether there will be more.
    """

    def __init__(self, observed: Observed, going: Callable[[], bool]) -> None:
        self._observed = observed
        self._going = going
        self._frame = b""
        self._made = float("-inf")
        self._changed = asyncio.Event()
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._page = b""
        self._page_made = float("-inf")
        self._drawing: asyncio.Task[None] | None = None

    async def latest(self) -> bytes:
        """The newest frame, at most a second old."""
        if time.monotonic() - self._made >= INTERVAL_S and not self._look():
            await asyncio.sleep(INTERVAL_S)  # no viewer for a while
            if time.monotonic() - self._made >= INTERVAL_S:
                self._look()
        return self._frame

    def _look(self) -> bool:
        self._frame, has_rates = self._observed.frame()
        self._made = time.monotonic()
        return has_rates

    def enter(self) -> None:
        """Begin to watch; call `leave` at the end. Raises ApiError: 503 if too many do."""
        if self._viewers >= MOST_VIEWERS:
            raise ApiError(
                503, f"{MOST_VIEWERS} viewers watch already", code="too_many_viewers", retry_after_s=INTERVAL_S
            )
        self._viewers += 1
        if self._task is None or self._task.done():
            self._changed = asyncio.Event()  # of this event loop
            self._task = asyncio.create_task(self._run(), name="headrace-live")

    def leave(self) -> None:
        self._viewers -= 1

    async def next(self) -> bytes | None:
        """The next frame; None once there are no more."""
        await self._changed.wait()
        return self._frame if self._going() else None

    async def _run(self) -> None:
        while self._viewers:
            if time.monotonic() - self._made >= INTERVAL_S / 2:
                self._look()
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await asyncio.sleep(INTERVAL_S)

    async def report(self) -> bytes:
        """The report, some seconds old at most; only one is drawn at a time.

        Raises:
            ApiError: 501 if what draws it is not installed, 503 if there is none yet.
        """
        if time.monotonic() - self._page_made >= _REPORT_S:
            if self._drawing is None or self._drawing.done():
                self._drawing = asyncio.create_task(self._draw(), name="headrace-report")
            await asyncio.shield(self._drawing)
        return self._page

    async def _draw(self) -> None:
        try:
            page = await asyncio.to_thread(self._observed.report)
        except MissingExtraError as error:
            raise ApiError(501, str(error), code="not_installed") from error
        except HeadraceError as error:  # such as a job that has not begun
            raise ApiError(503, str(error), code="not_ready", retry_after_s=_REPORT_S) from error
        self._page, self._page_made = page.encode(), time.monotonic()
