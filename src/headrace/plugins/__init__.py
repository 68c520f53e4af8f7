"""What can be plugged in: found by entry points, Headrace's own as anyone's.

- `registry.known`: what is registered in a group, by name
- `registry.load`: imports one, and returns what it registers
"""

from headrace.plugins.registry import Plugin, find, known, load

__all__ = ["Plugin", "find", "known", "load"]
