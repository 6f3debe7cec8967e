"""The one tool of the agents beside this file."""

import subprocess


def bash(command: str) -> str:
    """Run a shell command and return what it prints.

    Args:
        command: The command line.
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr
