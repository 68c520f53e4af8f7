"""The internals of a batcher: accept records, dispatch batches to the engine, return results.

- `dispatcher.Dispatcher`: forms a batch whenever the engine has a free slot
- `step_scheduler.StepScheduler`: the same for step-wise engines
"""
