"""Downloads that are killed: a complete file is never downloaded twice, and what is there at the end is the model.

`python -m tests.integration.hub.killing 50` kills 50 downloads.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.acceptance.command import python
from tests.integration.hub.standin import Hub, running_hub

FETCH = """
import sys
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.resolving import fetch, resolve
print(fetch(resolve(EngineConfig("embed", sys.argv[1]))))
"""


def fetch(name: str) -> subprocess.Popen[str]:
    """Begin to download a model, as a job does before it loads it."""
    return python(FETCH, ("fetch", name), folder=Path.cwd(), imported="models")


def kill_downloads(hub: Hub, source: Path, kills: int, *, seed: int = 0) -> tuple[Path, Counter[str]]:
    """Kill this many downloads at random places, then let one finish.

    Returns:
        The downloaded folder, and how often each file that was complete was still asked for again.
    """
    dice = random.Random(seed)
    commit = hub.repository("acme/killed").commit_folder(source)
    size = sum(path.stat().st_size for path in source.iterdir())
    cache = Path(os.environ["HF_HOME"]) / "hub" / "models--acme--killed" / "snapshots" / commit
    again: Counter[str] = Counter()
    complete: set[str] = set()
    hub.faults.block_s = 0.002
    for _ in range(kills):
        hub.asked.clear()
        ends = hub.sent.total() + dice.randint(1, size // 4)
        with fetch("acme/killed") as process:
            while process.poll() is None and hub.sent.total() < ends:
                time.sleep(0.001)
            assert process.poll() is None, "the download ended before it was killed"
            process.kill()
        again.update(complete & hub.asked.keys())
        complete = {path.name for path in cache.glob("*") if path.is_file()}
    assert complete, "no kill came after a file was complete"
    hub.faults.block_s = 0
    hub.asked.clear()
    with fetch("acme/killed") as process:
        said, _ = process.communicate()
    again.update(complete & hub.asked.keys())
    return Path(said.strip()), again


def check(folder: Path, source: Path) -> None:
    """Raise AssertionError if the downloaded files are not those of the source."""
    for path in source.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def sharded_model(folder: Path) -> Path:
    """An encoder whose weights are in many files: 20 MB in all."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from headrace.engines.model_folder import find_folder

    tokenizer = AutoTokenizer.from_pretrained(str(find_folder(None)), model_max_length=128)
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 4096}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes))
    model.save_pretrained(str(folder), max_shard_size="2MB")
    assert len(list(folder.glob("*.safetensors"))) > 5
    return folder


def main(kills: int) -> None:
    """Kill downloads, again and again from an empty cache."""
    with tempfile.TemporaryDirectory() as place:
        source, left = sharded_model(Path(place)), kills
        while left > 0:
            count = min(left, 8)
            with tempfile.TemporaryDirectory() as home, running_hub() as hub:
                os.environ |= {"HF_HOME": home, "HF_ENDPOINT": hub.url}
                folder, again = kill_downloads(hub, source, count, seed=left)
                check(folder, source)
            assert not again, again
            left -= count
            sys.stdout.write(f"{kills - left} downloads killed: no corrupt file, no complete file downloaded again\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
