"""Several models that share the memory of one device.

- `pool.ModelPool`: loads models when they are asked for, and unloads others to make room
- `reusable.ReusablePool`: models that are called from any thread and event loop
- `policy.decide`: which model to load or unload now; pure
"""
