"""What a server takes on, when, and for how long.

- `controller.AdmissionController`: what is taken on and what is refused
- `backfill.Backfill`: how much bulk work may wait beside requests
"""
