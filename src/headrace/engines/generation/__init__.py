"""Language models that transformers runs.

- `continuous.GenerationEngine`: requests join and leave between steps
- `static.StaticGenerationEngine`: static batches
"""
