"""The state of a job on disk: which records are done, which process owns the output, and the job's fingerprint.

- `output.JobOutput`: the working folder, resume, and the merge at the end
- `inspection.inspect`: what an output tells of its job
"""
