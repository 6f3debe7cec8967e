"""The embedded learner and engine, on PyTorch."""

import os

# Read by torch at its first allocation: large tensors on huge pages. On a virtual machine the first touch of a page
# costs more than the arithmetic on it, and a pass over a batch touches gigabytes.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
