"""What is kept on disk: what is done, by whom, and with what.

- `output.JobOutput`: the working folder, resume, and the merge at the end
- `inspection.inspect`: what an output tells of its job
"""
