"""The examples' agents, run as their users run them, against an endpoint that plays a script."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from .loaded import EXAMPLES, load

pytest.importorskip("agents")

QUESTION = "Ann has 37 apples and finds 5 more. How many apples now?"


class Endpoint(ThreadingHTTPServer):
    """Answers each request with the next message of `script` and keeps the requests' bodies."""

    script: list[dict[str, Any]]
    seen: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Endpoint  # type: ignore

    def do_POST(self) -> None:
        self.server.seen.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        message = self.server.script[len(self.server.seen) - 1]
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint(("127.0.0.1", 0), Handler)
    server.script, server.seen = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(endpoint: Endpoint, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"
    return subprocess.run(
        [sys.executable, str(EXAMPLES / example / "agent.py"), *arguments],
        env={**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def call(name: str, arguments: str, id: str = "call_7") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def test_the_calculator_agent_sends_a_call_back_as_it_was_and_survives_bad_arguments(endpoint: Endpoint) -> None:
    written = '{"expression":  "37+5"}'
    bad = call("calculator", '{"expression": 42}', "call_8")
    endpoint.script = [call("calculator", written), bad, {"content": "42"}]
    done = run(endpoint, "calculator", QUESTION)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    messages = endpoint.seen[-1]["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert messages[1]["content"] == QUESTION
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == written
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["42", "error"]
    assert endpoint.seen[0]["tools"][0]["function"]["parameters"]["properties"]["expression"]["type"] == "string"


def test_a_tool_that_does_not_exist_ends_the_agent_with_a_word_about_it(endpoint: Endpoint) -> None:
    endpoint.script = [call("abacus", "{}")]
    done = run(endpoint, "calculator", QUESTION)
    assert done.returncode == 1
    assert "abacus" in done.stderr


def test_the_tiny_agent_reads_the_sheets_of_its_task(endpoint: Endpoint) -> None:
    endpoint.script = [call("read", '{"sheet": "blue", "row": "fig"}'), {"content": "152"}]
    done = run(endpoint, "tiny", "weight of fig", "fig", "red=417 blue=152")
    assert (done.returncode, done.stdout) == (0, "152\n"), done.stderr
    assert endpoint.seen[-1]["messages"][-1]["content"] == "152"


@pytest.mark.parametrize(
    ("expression", "value"), [("37+48-9", 76), ("7*12", 84), ("84 / (3+1)", 21), (" -2*3 ", -6), ("0.5*3", 1.5)]
)
def test_the_calculator_works_out_arithmetic(monkeypatch: pytest.MonkeyPatch, expression: str, value: float) -> None:
    assert load(monkeypatch, "calculator", "agent").evaluate(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "x", "2**99", "__import__('os')", "1 if 1 else 2", "'a'*9", "1" * 201, "1/0"]
)
def test_the_calculator_does_nothing_else(monkeypatch: pytest.MonkeyPatch, expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        load(monkeypatch, "calculator", "agent").evaluate(expression)
