"""Files and object stores: locations, integrity checks and atomic commits.

- `parts.PartFolder`: parts of an output, committed atomically
- `locations.locate`: paths and URLs such as s3://bucket/key
"""
