"""Batch formation and cost. Pure: no clock, no event loop.

- `waiting_queue.WaitingQueue`: chooses the records of the next batch
- `cost.CostRule`: the cost of a record
- `slots.Slots`: the records in a step-wise engine
"""
