"""Concurrency without batches: one function over many items, one model for a process, an event loop on a thread."""
