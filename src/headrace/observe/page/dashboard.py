"""The page of the dashboard: one file without figures, whose script reads them."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from headrace.observe.accounting.timeline import COMPUTING, LABELS, LANES


@dataclass(frozen=True, slots=True)
class Page:
    """An HTML page."""

    content: str
    headers: Mapping[str, str]


@functools.cache
def dashboard() -> Page:
    """The page. Its policy allows its own script alone, and requests to its own server alone."""
    folder = files("headrace.observe.page") / "templates"
    names = ("dashboard.html", "report.css", "dashboard.css", "dashboard.js")
    frame, common, style, script = (folder.joinpath(name).read_text("utf-8") for name in names)
    for name, known in (("causes", LABELS), ("lanes", LANES), ("computing", COMPUTING)):
        script = script.replace(f"{{/*{name}*/}}", json.dumps(known))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    content = frame.replace("/*style*/", common + style).replace("/*script*/", script)
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Page(content, headers)
