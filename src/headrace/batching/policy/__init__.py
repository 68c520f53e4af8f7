"""Which records go next, and what they cost. Pure: no clock, no event loop.

- `waiting_queue.WaitingQueue`: which waiting records form the next batch
- `cost.CostRule`: what a record and a batch cost
- `slots.Slots`: who is in a step-wise engine
"""
