"""Another batching server, for `benchmarks.serving`: `MODEL=noop python -m benchmarks.peers NAME PORT`.

Runs in an environment of its own (`scripts/install-peers`), without Headrace.
"""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    importlib.import_module(f"benchmarks.peers.with_{sys.argv[1]}").serve(int(sys.argv[2]))
