"""Large tensors without page faults.

On a CPU the temporaries of a pass are megabytes each. By default glibc takes them from the kernel and gives them back
every time, and the kernel clears every page again: in a decode step on a virtual machine a fifth of the time.
"""

from __future__ import annotations

import ctypes
import os
import platform

# glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Let this process keep memory that it frees, and use huge pages for large tensors.

    Call it before the threads that will compute are started: a thread's own arena is cut into heaps of 64 MB that are
    given back as they empty. Does nothing where the C library is not glibc.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at its first allocation
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
