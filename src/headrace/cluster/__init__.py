"""Workers in other processes, here or on other machines. The pipeline, ledger and sink stay in the job's process.

- `worker.WorkerActor`: one engine and one batcher in a worker's process
- `local_workers.execute`: a job on several devices of this machine
- `ray_job.execute`: a job on a Ray cluster
- `ray_serve.served`: a server on Ray Serve
- `ray_data.Stage`: a model as a stage of Ray Data
- `flyte_app.app_environment`: a model as an app of Flyte
"""
