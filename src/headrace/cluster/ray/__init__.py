"""Ray: jobs, servers and functions on a Ray cluster.

- `plugin.CLUSTER`: Ray as a kind of cluster
- `serving.served`: a server on Ray Serve
- `data.Stage`: a model as a stage of Ray Data
- `tasks.ray_task`: a function as Ray tasks
"""
