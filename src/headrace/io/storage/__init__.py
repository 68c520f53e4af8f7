"""Files and objects: where they are, whether they are whole, and how they are committed.

- `parts.PartFolder`: parts of an output, committed atomically
- `locations.locate`: paths and addresses such as s3://bucket/key
"""
