"""A real vLLM on this machine's CPU, for tests: started with the flags that Longrein needs, ended with all its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent.parent
#: The interpreter that has vLLM; `make test-vllm` makes it.
PYTHON = Path(os.environ.get("LONGREIN_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
#: Made by examples/calculator/model.py.
MODEL = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longrein" / "smollm2-135m"

CONTEXT = 512
#: What a server that is trained with needs.
TRAINABLE = (
    "--enable-scale-out",
    *("--logprobs-mode", "processed_logprobs"),
    *("--structured-outputs-config.backend", "guidance"),
)


def missing() -> str:
    """Why no vLLM can be started here; empty when one can."""
    if not PYTHON.exists():
        return f"there is no {PYTHON}: make test-vllm installs vLLM"
    if not (MODEL / "model.safetensors").exists():
        return f"there is no model in {MODEL}: examples/calculator/model.py makes it"
    return ""


@dataclass
class Vllm:
    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End all its processes at once, as a power failure would."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels; `name` may go on with a part of them."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@contextmanager
def vllm(log: Path, flags: Sequence[str] = ()) -> Iterator[Vllm]:
    """Serve the model as `smol`; yields once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(MODEL), "--served-model-name", "smol", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--max-num-seqs", "32", "--enforce-eager"),
        *flags,
    ]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    server = Vllm(f"http://127.0.0.1:{port}", process)
    try:
        _wait(server, log)
        yield server
    finally:
        server.kill()


def _wait(server: Vllm, log: Path) -> None:
    while server.process.poll() is None:
        try:
            httpx.get(f"{server.url}/health", timeout=5, trust_env=False).raise_for_status()
            return
        except httpx.HTTPError:
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(0.5)
    raise AssertionError(f"vLLM ended with {server.process.returncode}:\n{log.read_text(errors='replace')[-4000:]}")
