"""The load benchmark in small: that it runs, and that it would notice what is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from longrein.records import Call, Rollout, RolloutStatus, now
from longrein.store import Store

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import load  # type: ignore[import-not-found]

    return load


@pytest.mark.parametrize("more", [[], ["--plain", "--clients", "2"]])
def test_nothing_is_lost_under_a_small_load(tmp_path: Path, more: list[str]) -> None:
    options = (
        "--agents 40 --seconds 3 --answer-seconds 0.4 --answer-tokens 12 --tool-seconds 0.3 --turns 3 --raise-by 0"
    )
    command = [sys.executable, str(BENCH / "load.py"), *options.split(), "--long", "2,6", *more]
    picture = tmp_path / "memory.png"
    done = subprocess.run([*command, "--picture", str(picture)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "errors: none" in done.stdout
    assert "lost: 0, recorded as given and not seen: 0" in done.stdout
    assert picture.stat().st_size > 0


async def test_what_is_lost_is_told(tmp_path: Path, load: ModuleType) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
    time = now()
    await store.add_rollouts(
        [Rollout(rollout_id="r", input={}, status=RolloutStatus(created_at=time, updated_at=time))]
    )
    for number, said in enumerate(["one", "two"]):
        reply = {"role": "assistant", "content": said}
        call = Call(
            rollout_id="r", attempt_id="0", number=number, dialect="chat", mode="train", model="m", engine="policy",
            reply=reply, prompt_delta=[1, 2], sampled=[3],
        )  # fmt: skip
        await store.add_call(call)
    seen = [load.checksum(said) for said in ("one", "two", "three")]
    for answers, lost, unseen in ((seen[:2], 0, 0), (seen, 1, 0), (seen[:1], 0, 1), ([seen[0], seen[0]], 1, 1)):
        compared = load.compare({"r": answers}, store)
        assert (compared.lost, compared.unseen, compared.tokens) == (lost, unseen, 6)
    sizes = load.bytes_of_calls(tmp_path / "store.sqlite", "r")
    assert len(sizes) == 2
    store.close()
