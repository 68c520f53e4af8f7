"""Models, one folder for each kind, and what they have in common.

- `config.EngineConfig`: task, model, engine and options, the same at every door
- `options.EngineOptions`: the options of all engines, with their types
- `loading.load_engine`: an engine from its configuration
- `registry.create`: an engine by task and name
- `base.Engine`: the seam between a batcher and a model
"""
