"""The machinery of a batcher: records in, batches to the engine, results back.

- `dispatcher.Dispatcher`: forms a batch whenever the engine has a free slot
- `step_scheduler.StepScheduler`: the same for engines that work in steps
"""
