"""Load an engine from its configuration, in this process or in a child process."""

from __future__ import annotations

from headrace.engines.base import Engine
from headrace.engines.choosing import registry
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.process import ProcessEngine
from headrace.engines.choosing.resolving import fetch


def load_engine(config: EngineConfig) -> Engine:
    """Load the model, which is downloaded first if need be. Blocks.

    Raises:
        ConfigError: no such task, engine, model or option.
        EngineError: the model cannot be loaded, or the code of a custom engine raised.
    """
    task, name, options = config.task or "", config.engine, config.engine_options
    model = fetch(config)
    if config.engine_process:
        return ProcessEngine(task, model, engine=name, options=options, timeout_s=config.engine_timeout_s)
    engine: Engine = registry.create(task, model, engine=name, **options)
    return engine
