"""infinity, which has its own inference of embedding models."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.peers.engine import BATCH


def serve(port: int) -> None:
    """Until stopped."""
    program = str(Path(sys.executable).with_name("infinity_emb"))
    words = f"v2 --engine torch --device cpu --host 127.0.0.1 --port {port} --url-prefix /v1 --batch-size {BATCH}"
    flags = "--no-bettertransformer --no-model-warmup --log-level error"
    os.execv(program, [program, *words.split(), *flags.split(), "--model-id", os.environ["MODEL"]])
