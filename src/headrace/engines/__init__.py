"""Inference engines: one folder per kind of model, and the code they share.

- `base.Engine`: the interface between a batcher and a model
- `profile.EngineProfile`: how an engine is fed; its `kind` makes the batcher
- `capabilities.Capability`: what only some engines can do, and how it is looked up
- `declaring.EngineOptions`: what an engine declares, its options among it; `tasks`: the tasks
"""
