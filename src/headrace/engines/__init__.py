"""Inference engines: one folder per kind of model, and the code they share.

- `config.EngineConfig`: task, model, engine and options, shared by the CLI, Python API, server and cluster
- `options.EngineOptions`: typed options of all engines
- `loading.load_engine`: creates an engine from its configuration
- `registry.create`: creates an engine by task and name
- `base.Engine`: the interface between a batcher and a model
"""
