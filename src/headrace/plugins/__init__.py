"""What can be plugged in: found by entry points, Headrace's own as anyone's."""

from headrace.plugins.registry import Plugin, find, known, load

__all__ = ["Plugin", "find", "known", "load"]
