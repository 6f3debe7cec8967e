"""vLLM servers that sample for a policy that is trained here: they are given its weights after each update.

The weights are written to a folder that the servers can read and loaded by their reload call, while the gate holds new
calls. Requests in hand stand still meanwhile and go on with the new weights, or are finished before (`in_flight`).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import httpx

from longrein.client import Client
from longrein.records import ModelEndpoint, PauseRequest
from longrein.trainer.collect import RunFailed

if TYPE_CHECKING:
    from longrein.trainer.torch.policy import Policy

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest pause, reload and so on of a server in seconds: large models are read from a disk, and replies waited for.
LOAD_SECONDS = 1800.0


class VllmServers:
    """Servers at `urls`, and those that register for the model, with the weights of `policy`.

    `folder` is where they find new weights: it has to be theirs under the same name. `computer` is the thread in which
    this process computes; `stop` ends it.
    """

    protocol: Literal["vllm"] = "vllm"

    def __init__(
        self,
        policy: Policy,
        urls: Sequence[str],
        folder: Path,
        computer: ThreadPoolExecutor,
        *,
        in_flight: Literal["freeze", "drain"] = "freeze",
    ) -> None:
        self.policy = policy
        self._pause_mode = {"freeze": "keep", "drain": "wait"}[in_flight]
        self.urls = list(urls)
        self.folder = folder
        self._computer = computer
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(LOAD_SECONDS, connect=10.0),
            mounts={"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None},
        )

    async def start(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    async def stop(self) -> None:
        await self._http.aclose()
        await asyncio.to_thread(self._computer.shutdown)

    async def hold(self) -> None:
        """Nothing is held: the servers have weights of their own."""

    def release(self) -> None:
        pass

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work(*arguments)` in the computing thread."""
        return await asyncio.get_running_loop().run_in_executor(self._computer, work, *arguments)

    @asynccontextmanager
    async def exchanging(self, version: int, client: Client, name: str) -> AsyncIterator[list[str]]:
        """Give the servers the policy's weights as `version`; their addresses.

        A server that cannot take them is left out by the gateway until it has those of a later version. Raises
        `RunFailed` when none can.
        """
        written = self.folder / f"version-{version:06d}"
        await self.compute(self.policy.save, written)
        named = [ModelEndpoint(name, url, version, "vllm") for url in self.urls]
        registered = [known for known in await client.models() if (known.model, known.protocol) == (name, "vllm")]
        servers = {known.endpoint: known.root for known in (*named, *registered)}
        if not servers:
            raise RunFailed("engine.urls: no vLLM server is named, and none has registered (POST /api/models)")
        failures: dict[str, str | None] = dict.fromkeys(servers)
        await client.pause(PauseRequest(reason="new weights"))
        try:
            loads = (self._load(root, written, version) for root in servers.values())
            failures = dict(zip(servers, await asyncio.gather(*loads), strict=True))
            for failure in filter(None, failures.values()):
                log.warning("%s", failure)
            if all(failures.values()):
                raise RunFailed(f"no engine took the weights of version {version}: {next(iter(failures.values()))}")
            yield list(servers)  # the version is registered before any token is sampled with it
        finally:
            # One that failed stands still: nobody knows what its weights are.
            good = [root for url, root in servers.items() if failures[url] is None]
            await asyncio.gather(*(self._post(root, "/resume") for root in good), return_exceptions=True)
            await client.resume()
        for older in self.folder.glob("version-*"):
            if older != written:
                shutil.rmtree(older, ignore_errors=True)

    async def _load(self, url: str, weights: Path, version: int) -> str | None:
        """Stop one server and load `weights` into it; why not, if that failed."""
        try:
            await self._post(url, f"/pause?mode={self._pause_mode}")
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
            await self._post(url, "/collective_rpc", call)
            # Requests in hand compute their keys and values anew.
            await self._post(url, "/reset_prefix_cache?reset_running_requests=true")
            await self._post(url, "/update_weight_version", {"new_version": str(version)})
        except (httpx.HTTPError, httpx.InvalidURL, Refused) as error:
            return f"the vLLM at {url} did not take the weights of version {version}: {error or type(error).__name__}"
        return None

    async def _post(self, url: str, path: str, body: Any = None) -> None:
        answer = await self._http.post(url + path, json=body)
        if answer.is_success:
            return
        words = f"{path} answered {answer.status_code}: {answer.text[:300]}"
        if answer.status_code in (403, 404, 405):
            words += " (is it started with VLLM_SERVER_DEV_MODE=1?)"
        raise Refused(words)


class Refused(Exception):
    """A server's answer that is no success."""
