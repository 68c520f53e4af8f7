"""What can be plugged in: found by entry points, Headrace's own as anyone's."""

from headrace.plugins.registry import GROUPS, OWN, Group, Plugin, known, load, working

__all__ = ["GROUPS", "OWN", "Group", "Plugin", "known", "load", "working"]
