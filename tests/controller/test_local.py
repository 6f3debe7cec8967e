"""An attempt's command, environment and directory."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from longrein.config import ConfigError
from longrein.controller import local
from longrein.controller.local import Ended, Site, attempt_directory, base_environment, fill, find_program, run_agent
from longrein.controller.warmstart import StartError
from longrein.records import Attempt, Json, LocalConfig, Outcome, Rollout, RolloutConfig, StartedAttempt

from .fakes import make_config, write

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


async def run(
    tmp_path: Path,
    agent: dict,
    task: Json | None = None,
    *,
    rollout_id: str = "r/1",
    is_train: bool = True,
    **config: object,
) -> Ended:
    options = make_config(tmp_path, agent=agent)
    launcher = local.make_launcher(options.agent, tmp_path / "launcher.log")
    site = Site(options.agent, tmp_path, tmp_path / "attempts", "http://gw:1/", launcher, lambda: 0.0)
    rollout = Rollout(rollout_id, task or {}, is_train, RolloutConfig(**config))  # type: ignore[arg-type]
    try:
        return await run_agent(site, StartedAttempt(rollout, Attempt(rollout_id, "0"), "lr-at-T"), asyncio.Event())
    finally:
        await launcher.close()


def test_placeholders() -> None:
    task = {"text": "a {task.n} b", "n": 3, "deep": {"list": [{"x": None}, "é"]}}
    folder = Path("/a")
    assert fill("{task.text}|{task.n}", task, folder, "o") == "a {task.n} b|3"
    assert fill("{task.deep.list.0}{task.deep.list.1}", task, folder, "o") == '{"x": null}é'
    assert fill("{task_file} {attempt_dir}", task, folder, "o") == "/a/task.json /a"
    assert json.loads(fill("{task}", task, folder, "o")) == task
    assert fill('{"json": {}} {other} ${HOME} {}', task, folder, "o") == '{"json": {}} {other} ${HOME} {}'
    for path in ("m", "n.x", "deep.list.2", "deep.list.-1", "text.0"):
        with pytest.raises(StartError, match=r"no field .*; its fields are: deep, n, text"):
            fill("{task." + path + "}", task, folder, "o")


def test_ids_that_are_no_file_names_stay_inside() -> None:
    root = Path("/runs/attempts")
    assert attempt_directory(root, "s1-g2-r03", "0") == root / "s1-g2-r03/0"
    for name in ("../../etc", "..", ".", "a/b", "/abs"):
        assert attempt_directory(root, name, "0").parent.parent == root
        assert Path(os.path.normpath(attempt_directory(root, name, "0"))).parent.parent == root


def test_programs(tmp_path: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "folder"
    tool = write(folder, "bin/tool", "#!/bin/sh\n")
    with pytest.raises(StartError, match=r"chmod \+x"):
        find_program("bin/tool", "", [work, folder])
    tool.chmod(0o755)
    assert find_program("bin/tool", "", [work, folder]) == str(tool)
    write(work, "bin/tool", "#!/bin/sh\n").chmod(0o755)
    assert find_program("./bin/tool", "", [work, folder]) == str(work / "./bin/tool")
    assert find_program("tool", str(folder / "bin"), []) == str(tool)
    assert find_program("python", "", []) == sys.executable
    with pytest.raises(StartError, match=r"agent\.command: no program 'tool' in PATH"):
        find_program("tool", "/nowhere", [])


def test_no_secret_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "LONGREIN_KEY", "HF_TOKEN", "PYTHON_KEYRING_PASSWORD", "RANDOM_NAME", "HTTP_PROXY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("LC_TIME", "C")
    kept = base_environment()
    assert "x" not in kept.values()
    assert (kept["PYTHONHASHSEED"], kept["LC_TIME"]) == ("7", "C")
    assert str(Path(sys.executable).parent) in kept["PATH"].split(":")


async def test_the_environment_of_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREIN_RUN_KEY", "run-key")
    agent = {"command": ["python", "-c", PRINT_ENVIRONMENT], "env": {"SEED": "{task.seed}", "FIXED": "1"}}
    ended = await run(tmp_path, agent, {"seed": 5})
    assert ended.outcome is Outcome.succeeded, ended.reason
    seen = json.loads((ended.directory / "stdout.log").read_text())
    models = "http://gw:1/proxy/rollout/r%2F1/attempt/0/mode/train"
    ours = {
        "OPENAI_BASE_URL": f"{models}/openai/v1",
        "OPENAI_API_BASE": f"{models}/openai/v1",
        "OPENAI_API_KEY": "lr-at-T",
        "ANTHROPIC_BASE_URL": f"{models}/anthropic",
        "ANTHROPIC_AUTH_TOKEN": "lr-at-T",
        "AGL_OPENAI_BASE_URL": f"{models}/openai/v1",
        "AGL_KEY": "lr-at-T",
        "AGL_EVENT_URL": "http://gw:1/api/rollouts/r%2F1/attempt/0/events",
        "LONGREIN_TASK": str(ended.directory / "task.json"),
        "SEED": "5",
        "FIXED": "1",
    }
    assert {name: seen.get(name) for name in ours} == ours
    assert seen.keys() - ours.keys() - base_environment().keys() <= {"LC_CTYPE"}
    assert "run-key" not in seen.values()


async def test_a_held_out_rollout_is_in_mode_val(tmp_path: Path) -> None:
    ended = await run(tmp_path, {"command": ["sh", "-c", "echo $OPENAI_BASE_URL"]}, is_train=False)
    assert "/mode/val/openai/v1" in (ended.directory / "stdout.log").read_text()


async def test_the_working_directory_is_a_fresh_copy_of_the_workspace(tmp_path: Path) -> None:
    workspace = tmp_path / "template"
    write(workspace, "src/a.txt", "original")
    write(tmp_path, "attempts/r%2F1/0/work/stale", "of an earlier record")
    agent = {"command": ["sh", "-c", "echo changed > src/a.txt; ls; cat $LONGREIN_TASK"], "workspace": str(workspace)}
    ended = await run(tmp_path, agent, {"q": "é"})
    assert (ended.directory / "stdout.log").read_text() == 'src\n{"q":"é"}'
    assert (ended.directory / "work/src/a.txt").read_text() == "changed\n"
    assert (workspace / "src/a.txt").read_text() == "original"


async def test_a_script_beside_the_run_file_is_found(tmp_path: Path) -> None:
    write(
        tmp_path, "agent.py", "import helper, sys, os; print(helper.NAME, sys.argv[1:], os.path.basename(os.getcwd()))"
    )
    write(tmp_path, "helper.py", "NAME = 'beside'")
    ended = await run(tmp_path, {"command": ["python", "agent.py", "{task.q}", "agent.py"]}, {"q": "why?"})
    assert (ended.directory / "stdout.log").read_text() == "beside ['why?', 'agent.py'] work\n", ended.reason


AGENTS = """
import asyncio, os
class Plain:
    def run(self): print("plain", os.environ["Q"], os.environ["WHOLE"])
class Later:
    async def run(self):
        await asyncio.sleep(0)
        print("later", os.environ["Q"])
"""


@pytest.mark.parametrize("warm", [False, True])
async def test_agent_lightning_classes(tmp_path: Path, warm: bool) -> None:
    write(tmp_path, "agents_here.py", AGENTS)
    agent = {"command": [], "preload": ["json"] if warm else []}
    mapped = LocalConfig("agents_here.Plain", {"Q": "input.data.q", "WHOLE": "input.data"})
    ended = await run(tmp_path, agent, {"data": {"q": "x y"}}, local=mapped)
    assert (ended.directory / "stdout.log").read_text() == 'plain x y {"q": "x y"}\n', ended.reason
    agent["agent_class"] = "agents_here:Later"
    ended = await run(tmp_path, agent, {"data": {"q": "x y"}}, local=LocalConfig(env_map={"Q": "input.data.q"}))
    assert (ended.directory / "stdout.log").read_text() == "later x y\n", ended.reason
    for env_map, message in (({"Q": "data.q"}, "input.path.to.field"), ({"Q": "input.absent"}, "no field 'absent'")):
        ended = await run(tmp_path, agent, {"data": {}}, local=LocalConfig(env_map=env_map))
        assert ended.final
        assert message in (ended.reason or "")


async def test_a_signal_and_a_program_that_is_none(tmp_path: Path) -> None:
    ended = await run(tmp_path, {"command": ["sh", "-c", "kill -SEGV $$"]})
    assert (ended.outcome, ended.exit_code) == (Outcome.agent_failed, -11)
    assert (ended.reason or "").startswith("ended by signal 11")
    write(tmp_path, "tool", "no program").chmod(0o755)
    ended = await run(tmp_path, {"command": ["./tool"]})
    assert (ended.outcome, ended.final) == (Outcome.infrastructure_failed, False)
    assert "Exec format error" in (ended.reason or "")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"command": ["sh", "-c", "x"]}, "'sh' is not a Python interpreter"),
        ({"command": ["python", "-c", "x"]}, "has to be"),
        ({"command": ["python"]}, "has to be"),
        ({"command": ["python", "a.py"], "env": {"PYTHONHASHSEED": "1"}}, "PYTHONHASHSEED takes effect"),
    ],
)
def test_what_does_not_go_with_preload(tmp_path: Path, agent: dict, message: str) -> None:
    options = make_config(tmp_path, agent={**agent, "preload": ["json"]})
    with pytest.raises(ConfigError, match=message):
        local.make_launcher(options.agent, tmp_path / "log")
