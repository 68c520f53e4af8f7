"""The files and batches of the Batch API.

- `store.Batches`: all batches and their lifecycle
- `files.FileStore`: uploaded and output files
"""
