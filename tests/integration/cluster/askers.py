"""A steady load from a process of its own: `python -m tests.integration.cluster.askers URL MANY`, until SIGTERM.

Each asks once more after that. Says "asking" once each has had an answer.
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

    answered = threading.Barrier(many + 1)

    def ask_once(client: httpx.Client) -> None:
        try:
            reply = client.post(f"{url}/v1/embeddings", json={"input": ["a text", "another"]})
            seen[f"{reply.status_code} {reply.json().get('model')}"] += 1
        except (httpx.HTTPError, ValueError) as error:
            seen[f"0 {error!r}"] += 1

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            ask_once(client)
            answered.wait()
            while not enough.is_set():
                ask_once(client)
            ask_once(client)

    askers = [threading.Thread(target=ask) for _ in range(many)]
    for asker in askers:
        asker.start()
    answered.wait()
    sys.stdout.write("asking\n")
    sys.stdout.flush()
    enough.wait()
    for asker in askers:
        asker.join()
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
