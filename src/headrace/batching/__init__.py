"""Batchers: collect records from many callers, batch them for one function, return results. Standard library only.

- `dynamic.DynamicBatcher`: batches records for a function by cost and size
- `tokens.TokenBatcher`: the same, with cost measured in tokens
- `continuous.ContinuousBatcher`: records join and leave the engine between steps
- `passthrough.PassthroughBatcher`: for engines that batch by themselves
- `decorator.batched`: turns a function of a list into a function of one item
- `stats.BatchStats`: a batcher's counters
"""
