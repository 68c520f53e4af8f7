"""Language models on transformers.

- `continuous.GenerationEngine`: continuous batching, requests join and leave between steps
- `static.StaticGenerationEngine`: static batching
"""
