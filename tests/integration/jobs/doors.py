"""A process that says whose terms its messages use."""

from __future__ import annotations

from headrace.processes.spawn import child_connection
from headrace.wording import spoken


def serve(descriptor: int) -> None:
    """Send the door."""
    child_connection(descriptor).send(spoken())
