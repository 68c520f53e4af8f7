"""Datasets on the Hugging Face Hub, as inputs and outputs."""
