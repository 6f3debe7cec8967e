"""Runs code that is not trusted: on a copy of its files, without network, credentials, or the rest of the file system.

A grader uses `run` for whatever must execute an agent's code, and `run_pytest` where that is hidden tests:

    from longrein.sandbox import run_pytest
    return float(run_pytest(workspace, HIDDEN).passed)

Isolation is bubblewrap's when it is installed, otherwise that of the same Linux namespaces through `unshare` (which wants
util-linux' other programs too). Without either, `run` raises: it never runs anything unprotected.
"""

from longrein.sandbox.copying import MOST_BYTES, MOST_FILES, SandboxError, copy_tree, lay_over
from longrein.sandbox.running import Completed, Limits, run
from longrein.sandbox.testing import Tested, run_pytest

__all__ = [
    "MOST_BYTES",
    "MOST_FILES",
    "Completed",
    "Limits",
    "SandboxError",
    "Tested",
    "copy_tree",
    "lay_over",
    "run",
    "run_pytest",
]
