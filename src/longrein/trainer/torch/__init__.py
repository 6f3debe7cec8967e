"""The embedded learner and engine, on PyTorch."""
