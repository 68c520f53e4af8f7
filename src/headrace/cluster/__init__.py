"""Workers in other processes, here or on other machines. The pipeline, ledger and sink stay in the job's process.

- `worker.WorkerActor`: one engine and one batcher in a worker's process
- `local_workers.execute`: a job on several devices of this machine
- `base.Cluster`: a kind of cluster, found by entry points; each has a folder of its own
"""
