"""The interface between a task and the network that computes it, and networks on PyTorch.

- `base.Network`: the interface
- `pytorch.TorchNetwork`: a network on PyTorch
"""
