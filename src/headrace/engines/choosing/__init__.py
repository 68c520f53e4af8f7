"""From the name of a task, an engine and a model to a loaded engine.

- `config.EngineConfig`: task, model, engine and options, shared by the CLI, Python API, server and cluster
- `loading.load_engine`: creates an engine from its configuration
- `registry.create`: creates an engine by task and name
"""
