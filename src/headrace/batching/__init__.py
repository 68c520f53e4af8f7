"""Batchers: records from many callers in, batches to one function, results back. Standard library alone.

- `dynamic.DynamicBatcher`: batches for a function, by cost and size
- `tokens.TokenBatcher`: the same, with cost in tokens
- `continuous.ContinuousBatcher`: records join and leave between the steps of an engine
- `passthrough.PassthroughBatcher`: for engines that batch by themselves
- `decorator.batched`: makes a function of one item from a function of a list
- `stats.BatchStats`: what a batcher has counted
"""
