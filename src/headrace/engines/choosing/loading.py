"""Load an engine from its configuration, in this process or in a child process."""

from __future__ import annotations

import os

from headrace.engines.base import Engine
from headrace.engines.choosing import registry
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.resolving import fetch

_SPINS = "1000"
"""How often a thread of PyTorch looks whether the others are done, before it sleeps: for some 50 µs. As it comes, for
ten milliseconds: beside other work, which keeps the others from their core, batches of 50 ms took 700."""


def load_engine(config: EngineConfig) -> Engine:
    """Load the model, which is downloaded first if need be. Blocks.

    Raises:
        ConfigError: no such task, engine, model or option.
        EngineError: the model cannot be loaded, or the code of a custom engine raised.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read when PyTorch is imported
    task, name, options = config.task or "", config.engine, config.engine_options
    model = fetch(config)
    if config.engine_process:
        from headrace.engines.choosing.process import ProcessEngine

        return ProcessEngine(task, model, engine=name, options=options, timeout_s=config.engine_timeout_s)
    engine: Engine = registry.create(task, model, engine=name, **options)
    return engine
