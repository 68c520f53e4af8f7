"""What can be plugged in: found by entry points, Headrace's own as anyone's.

- `registry.known`: what is registered in a group, by name
- `registry.load`: imports one by its name
- `registry.working`: imports all that can be used
"""

from headrace.plugins.registry import GROUPS, OWN, Group, Plugin, addresses, known, left_out, load, working

__all__ = ["GROUPS", "OWN", "Group", "Plugin", "addresses", "known", "left_out", "load", "working"]
