"""A steady load from a process of its own: `python -m tests.integration.cluster.askers URL MANY`, until SIGTERM.

Prints how often each status came with each model's name; what was no answer counts as status 0.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections import Counter

import httpx


def main() -> None:
    """Ask, so many at a time."""
    url, many = sys.argv[1], int(sys.argv[2])
    enough = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: enough.set())
    seen: Counter[str] = Counter()

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not enough.is_set():
                try:
                    reply = client.post(f"{url}/v1/embeddings", json={"input": ["a text", "another"]})
                    seen[f"{reply.status_code} {reply.json().get('model')}"] += 1
                except (httpx.HTTPError, ValueError) as error:
                    seen[f"0 {error!r}"] += 1

    askers = [threading.Thread(target=ask) for _ in range(many)]
    for asker in askers:
        asker.start()
    sys.stdout.write("asking\n")
    sys.stdout.flush()
    enough.wait()
    for asker in askers:
        asker.join()
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
