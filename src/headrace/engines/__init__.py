"""Inference engines: one folder per kind of model, and the code they share.

- `base.Engine`: the interface between a batcher and a model
- `declaring.EngineOptions`: what an engine declares, its options among it; `tasks`: the tasks
"""
