"""The way of a record through a job: read, prepare, infer, settle, write.

- `job.Job`: a job as it is handed to its run
"""
