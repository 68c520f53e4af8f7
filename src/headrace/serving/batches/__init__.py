"""The files and batches of the Batch API.

- `store.Batches`: every batch from its creation to its end
- `files.FileStore`: uploaded and produced files
"""
