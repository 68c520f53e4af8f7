"""Concurrent calls without batching.

- `fanout.map_concurrent`: calls one function for many items
- `map_batches.map_batches`: a batcher for synchronous code
- `reusable.reusable`: one model and one batcher for a process
- `loop_thread.LoopThread`: an event loop on a separate thread
"""
