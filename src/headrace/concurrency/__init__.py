"""Many calls at a time that form no batch.

- `fanout.map_concurrent`: one function over many items
- `map_batches.map_batches`: a batcher for code without an event loop
- `reusable.reusable`: one model and one batcher for a process
- `loop_thread.LoopThread`: an event loop on a thread of its own
"""
