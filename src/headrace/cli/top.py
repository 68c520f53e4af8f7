"""`headrace top`: what a job or a server does now."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Annotated, ClassVar

import typer

from headrace.app.jobs.steps import steps_here, steps_holder
from headrace.cli.flags import with_settings
from headrace.cli.outcome import say
from headrace.cli.report import reported_jobs
from headrace.errors import ConfigError, HeadraceError
from headrace.io.storage.locations import as_os_errors, is_remote
from headrace.jobs.state.inspection import LoadingError, NoJobError, job_holder, known_target, state_of
from headrace.jobs.state.output import LIVE
from headrace.observe.live.frame import Frame, parse_frame, wall_clock
from headrace.observe.page.dashboard import Page, dashboard
from headrace.observe.page.render import render
from headrace.options import option
from headrace.wording import with_trust

EXAMPLES = """Examples:

headrace top vectors.parquet

headrace top http://localhost:8000

headrace top --once vectors.parquet
"""
STATE_PATH = "/dashboard/state"
_MOST_BYTES = 1_000_000
_TIMEOUT_S = 5.0
_LOADING = "loading the model"

What = Annotated[str, typer.Argument(metavar="OUTPUT|URL", help="The output of a job, or the address of a server.")]


@dataclass(frozen=True, slots=True)
class LookFlags:
    """How often it looks."""

    panel: ClassVar[str] = "Options"

    once: bool = option(False, "Print the present state once and exit.")
    interval: float = option(1.0, "Seconds between two looks.", minimum=0.2, maximum=3600)


@with_settings
def top(what: What, look: LookFlags) -> int:
    """Show what a job or a server does now: stages, rates, causes, queues, errors and workers.

    It ends with the job, or with Ctrl-C. A job that has not started yet is waited for.

    A server with API keys needs one of them in the environment variable HEADRACE_API_KEY.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the terminal is left as it was
        signal.signal(number, signal.default_int_handler)
    try:
        return _top(what, look.interval, once=look.once)
    except KeyboardInterrupt:
        return 0


def _top(what: str, interval: float, *, once: bool) -> int:
    look = _of_server(what) if what.startswith(("http://", "https://")) else lambda: job_frame(what)
    try:
        frame = look() if once else _waited_for(look, what, interval)
    except LoadingError as loading:
        say(str(loading))
        return 0
    from rich.console import Console
    from rich.live import Live

    from headrace.observe.live.top import render_frame

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(render_frame(frame, wall_clock()))
        while not once and not _ended(frame):
            time.sleep(interval)
            console.print()
            frame = _next(look, frame)
            console.print(render_frame(frame, wall_clock()))
        return 0
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not _ended(frame):
                live.update(render_frame(frame, wall_clock()), refresh=True)
                time.sleep(interval)
                frame = _next(look, frame)
    finally:
        console.print(render_frame(frame, wall_clock()))
    return 0


def _ended(frame: Frame) -> bool:
    return frame.kind == "job" and not frame.state.startswith(("running", _LOADING))


def _waited_for(look: Callable[[], Frame], what: str, interval: float) -> Frame:
    """The first frame. A job that has not started is waited for."""
    said = ""
    while True:
        try:
            return look()
        except NoJobError as error:
            if not is_remote(place := known_target(what).place) and not place.parent.is_dir():
                raise
            now = str(error) if isinstance(error, LoadingError) else f"no job has written {what} yet"
            if now != said:
                say(f"{now}; waiting for it to start (Ctrl-C ends)")
            said = now
            time.sleep(interval)


def _next(look: Callable[[], Frame], before: Frame) -> Frame:
    """The next frame, or the last one if there is none for the moment."""
    try:
        return look()
    except ConfigError:
        if before.kind == "job":  # it is being replaced
            return before
        return replace(before, state="no answer")


def job_frame(name: str) -> Frame:
    """The state of the job with this output; of a job of several steps, that of the step it has come to.

    Raises:
        NoJobError: there is none yet.
        ConfigError: its state cannot be read.
    """
    steps = steps_here(name)
    begun = [step for step in steps if step.has_begun]
    if not begun:
        return _frame(name, steps[0].output if steps and steps_holder(name) else name)
    frame = replace(_frame(name, begun[-1].output), name=f"{name}: {begun[-1].name}")
    if frame.state == "finished" and len(begun) < len(steps):
        done = f"step {len(begun)} of {len(steps)} is finished"
        if (loads := job_holder(known_target(steps[len(begun)].output))) is not None:
            return replace(frame, state=f"{_LOADING} of the next step, by {loads}: {done}")
        holder = steps_holder(name)
        now = (
            "running" if holder or is_remote(known_target(name).place) else "stopped"
        )  # a store has no lock to look at
        return replace(frame, state=f"{now}: {done}")
    return frame


class ObservedJob:
    """What a job shows of itself, for its dashboard: what its files say."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.monotonic()
        self.page: Page = dashboard()

    def frame(self) -> tuple[bytes, bool]:
        """The present state as JSON. The job itself has made its rates."""
        try:
            frame = job_frame(self._name)
        except HeadraceError:  # it loads its model, or replaces its files
            up_s = time.monotonic() - self._began
            nothing: dict[str, float] = {}
            frame = Frame("job", self._name, "starting", wall_clock(), up_s, 0.0, nothing, nothing, {},
                          {"starting": 1.0}, nothing, nothing)  # fmt: skip
        return frame.as_json().encode(), True

    def report(self) -> str:
        """The report as an HTML page. Raises HeadraceError: it cannot be drawn."""
        return render(reported_jobs(self._name))


def _frame(name: str, output: str) -> Frame:
    """The state of the job of that name, or of its step with this output.

    Raises:
        NoJobError: there is none yet.
        ConfigError: its state cannot be read.
    """
    try:
        target, state = state_of(output)
    except LoadingError as loading:
        raise LoadingError(name, loading.holder) from None
    path = target.work / LIVE
    try:
        frame = parse_frame(as_os_errors(path.read_bytes)())
    except FileNotFoundError:
        if job_holder(target):
            raise NoJobError(f"the job of {name} has just started; try again in a second") from None
        raise ConfigError(
            f"there is no {path}: the job ended at once, or an earlier version ran it; see headrace inspect {name}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    holder = job_holder(target)
    if holder is not None and frame.at < holder.since:  # what an earlier run has left
        return replace(frame, state=f"{_LOADING}, by {holder}", eta_s=None)
    if holder:
        return replace(frame, state=f"running, by {holder}")
    if state.finished:
        return replace(frame, state="finished", fraction=1.0, eta_s=None)
    return replace(frame, state="stopped" if frame.state in ("running", "interrupted") else frame.state, eta_s=None)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key must not go to another server."""

    def redirect_request(self, *_: object) -> None:
        """Nothing, so that the redirect becomes an error."""


def _of_server(url: str) -> Callable[[], Frame]:
    """Looks at the server at `url`. Raises ConfigError: the key cannot be sent."""
    key = os.environ.get("HEADRACE_API_KEY", "").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError("the environment variable HEADRACE_API_KEY contains characters that an API key cannot have")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    address = url.rstrip("/").removesuffix("/dashboard").removesuffix("/v1") + STATE_PATH
    opener = urllib.request.build_opener(_NoRedirect)

    def look() -> Frame:
        try:
            request = urllib.request.Request(address, headers=headers)
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                content = answer.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{url} answers {error.code} {_reason(error)}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise ConfigError(f"cannot reach {url}: {with_trust(str(getattr(error, 'reason', error)))}") from error
        try:
            return parse_frame(content)
        except ValueError as error:
            raise ConfigError(f"what {address} answers cannot be shown: {error}") from error

    return look


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "(unauthorized): put an API key of it in the environment variable HEADRACE_API_KEY"
    if error.code == 403:
        return "(forbidden): this needs an admin key"
    if error.code == 404:
        return "(not found): it is not a Headrace server, or it runs an earlier version"
    if error.code == 501:
        return "(not implemented): a server with replicas has no dashboard; read its /metrics"
    return f"({error.reason})"
