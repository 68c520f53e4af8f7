"""Inference engines: one folder per kind of model, and the code they share.

- `base.Engine`: the interface between a batcher and a model
- `options.EngineOptions`: typed options of all engines
"""
