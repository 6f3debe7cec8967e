"""How each harness is run on a task: its command, its environment, its files, and where its answer stands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .install import INSTALLS, binaries

AGENTS = Path(__file__).parent / "agents"


@dataclass(frozen=True)
class Place:
    """Where one run happens."""

    openai: str
    """The attempt's base URL for OpenAI's dialects, with its /v1."""
    anthropic: str
    """Its base URL for Anthropic's."""
    token: str
    home: Path
    work: Path
    """The scratch folder that the harness works in; empty at first."""
    task: str


Command = Callable[[Place], list[str]]


@dataclass(frozen=True, eq=False, repr=False)
class Driver:
    """One way of running one harness."""

    name: str
    install: str
    dialect: str
    command: Command
    streams: bool = False
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    prepare: Callable[[Place], None] = lambda place: None
    answer: Callable[[Place, str], str] = lambda place, printed: printed
    """The final answer, from what the harness printed and left behind."""
    forks: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Manner → fork causes of the calls that continue the main conversation, in order."""
    title: bool = False
    """Asks for a title beside its first call."""
    calculator: bool = False
    """Has no shell, but a calculator from an MCP server."""
    flattens: bool = False
    """Gives its own calls back as text, so that no call continues the one before it."""
    twin: bool = False
    """Another driver sends the same requests, but not streamed: what is recorded is the same."""

    def __repr__(self) -> str:
        return f"{self.name} ({self.dialect})"

    @property
    def cheap(self) -> bool:
        return INSTALLS[self.install].cheap

    @property
    def version(self) -> str:
        return INSTALLS[self.install].version


def _python(install: str, agent: str, *arguments: str) -> Command:
    return lambda place: [str(binaries(install) / "python"), str(AGENTS / f"{agent}.py"), *arguments, place.task]


def _program(install: str, *words: str) -> str:
    return str(binaries(install).joinpath(*words))


def _openai(place: Place) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": place.openai,
        "OPENAI_API_KEY": place.token,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


# mini-swe-agent


def _mini(place: Place) -> list[str]:
    end = ["-y", "--exit-immediately", "-o", str(place.home / "trajectory.json")]
    return [_program("mini-swe-agent", "mini"), "-m", "openai/policy", "-t", place.task, *end]


def _mini_environment(place: Place) -> dict[str, str]:
    return {
        **_openai(place),
        "OPENAI_API_BASE": place.openai,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }


def _mini_answer(place: Place, printed: str) -> str:
    return json.loads((place.home / "trajectory.json").read_text())["info"]["submission"]


# Claude Code


def _claude(place: Place) -> list[str]:
    options = ["--dangerously-skip-permissions", "--output-format", "json"]
    return [_program("claude-code", "claude"), "-p", place.task, *options]


def _claude_environment(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.anthropic,
        "ANTHROPIC_AUTH_TOKEN": place.token,
        "ANTHROPIC_MODEL": "policy",
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _claude_answer(place: Place, printed: str) -> str:
    return json.loads(printed)["result"]


# Codex


def _codex(place: Place) -> list[str]:
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [_program("codex", "codex"), "exec", *options, place.task]


def _codex_files(place: Place) -> None:
    settings = f"""\
model = "policy"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "{place.openai}"
env_key = "GATEWAY_KEY"
wire_api = "responses"
"""
    (place.home / ".codex").mkdir()
    (place.home / ".codex" / "config.toml").write_text(settings)


# qwen-code and opencode


def _qwen(place: Place) -> list[str]:
    program = binaries("qwen-code") / "qwen"
    return [_program("node", "node"), str(program), "--auth-type", "openai", "-y", "-p", place.task]


def _opencode(place: Place) -> list[str]:
    return [_program("opencode", "opencode"), "run", "-m", "gateway/policy", place.task]


def _opencode_files(place: Place) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": "{env:GATEWAY_URL}", "apiKey": "{env:GATEWAY_KEY}"},
        "models": {"policy": {"limit": {"context": 200_000, "output": 8_000}}},
    }
    settings = {"provider": {"gateway": provider}, "permission": {"bash": "allow", "edit": "allow"}}
    folder = place.home / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps(settings))


def _opencode_environment(place: Place) -> dict[str, str]:
    return {
        "GATEWAY_URL": place.openai,
        "GATEWAY_KEY": place.token,
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


#: Every call continues the one before it.
_CHAIN = (None, None, None)
#: The harness gives back what it was given, byte for byte or as equal JSON; the template spells odd arguments in its
#: own way.
_EXACT = {"plain": _CHAIN, "thinking": _CHAIN, "odd": ("template", "template", "template")}
#: It leaves reasoning out of what it gives back.
_FORGETS = {"plain": _CHAIN, "thinking": ("reasoning",) * 3, "odd": ("template",) * 3}
#: It gives reasoning back as text.
_TELLS = {"plain": _CHAIN, "thinking": ("rewrite", "reasoning", "rewrite"), "odd": ("rewrite", "template", "rewrite")}

DRIVERS = [
    Driver(
        "mini-swe-agent",
        "mini-swe-agent",
        "chat",
        _mini,
        environment=_mini_environment,
        answer=_mini_answer,
        forks=_EXACT,
    ),
    Driver(
        "Claude Code",
        "claude-code",
        "messages",
        _claude,
        streams=True,
        environment=_claude_environment,
        answer=_claude_answer,
        forks=_EXACT,
    ),
    Driver(
        "Codex CLI",
        "codex",
        "responses",
        _codex,
        streams=True,
        environment=lambda place: {"GATEWAY_KEY": place.token},
        prepare=_codex_files,
        forks=_EXACT,
    ),
    *(
        Driver(
            f"{name}, {'streamed' if way == 'stream' else 'whole'}",
            install,
            dialect,
            _python(install, script, dialect, way),
            streams=way == "stream",
            twin=way == "stream",
            environment=_openai,
            forks=_FORGETS if dialect == "chat" else _EXACT,
        )
        for name, install, script in (
            ("OpenAI Agents SDK", "openai-agents", "openai_agents"),
            ("LangGraph", "langgraph", "langgraph_agent"),
        )
        for dialect in ("chat", "responses")
        for way in ("whole", "stream")
    ),
    Driver(
        "OpenHands SDK",
        "openhands",
        "chat",
        _python("openhands", "openhands_agent"),
        environment=_openai,
        forks=_FORGETS,
    ),
    *(
        Driver(
            f"AutoGen, {'streamed' if kind == 'stream' else 'whole'}",
            "autogen",
            "chat",
            _python("autogen", "autogen_agent", kind),
            streams=kind == "stream",
            twin=kind == "stream",
            environment=_openai,
            forks=_FORGETS,
        )
        for kind in ("shell", "stream")
    ),
    Driver(
        "AutoGen with mcp-server-calculator",
        "autogen",
        "chat",
        _python("autogen", "autogen_agent", "calculator"),
        environment=_openai,
        forks={manner: ("tools",) for manner in ("plain", "thinking", "odd")},
        calculator=True,
    ),
    Driver(
        "qwen-code",
        "qwen-code",
        "chat",
        _qwen,
        streams=True,
        environment=lambda place: {**_openai(place), "OPENAI_MODEL": "policy"},
        forks=_EXACT,
    ),
    Driver(
        "opencode",
        "opencode",
        "chat",
        _opencode,
        streams=True,
        environment=_opencode_environment,
        prepare=_opencode_files,
        forks=_EXACT,
        title=True,
    ),
    *(
        Driver(
            "Pydantic AI",
            "pydantic-ai",
            dialect,
            _python("pydantic-ai", "pydantic_ai_agent", dialect),
            environment=_openai,
            forks=_TELLS if dialect == "responses" else _EXACT,
        )
        for dialect in ("chat", "responses")
    ),
    Driver(
        "smolagents",
        "smolagents",
        "chat",
        _python("smolagents", "smolagents_agent"),
        environment=_openai,
        forks={manner: ("rewrite",) * 3 for manner in ("plain", "thinking", "odd")},
        flattens=True,
    ),
]

SYSTEM_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
