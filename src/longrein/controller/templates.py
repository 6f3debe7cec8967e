"""Job templates: a Kubernetes Job written as YAML with Jinja in it, and what a rollout may put into it.

A template is the operator's; a task is not trusted, and neither is what else a rollout carries. A template is rendered by
Jinja's immutable sandbox, with the fields of `FIELDS` and no others, in a process of its own with bounds on its time,
memory and output. And a value never becomes YAML: each `{{ … }}` writes a placeholder, the placeholders are put into the
document after it has been parsed, and so no text of a task can open a key, a list or a document.

* A scalar that is one expression and nothing else, without quotes, becomes the expression's value as it is:
  `activeDeadlineSeconds: {{ timeout_seconds }}` a number, `args: {{ task.args }}` a list, `value: {{ task.answer }}` text
  if it is text, whatever it looks like.
* Everywhere else (`"--question={{ task.question }}"`) the value stands as text: text as it is, anything else as JSON.

`render_job_template` is the whole interface. This file is also the program of that process, and imports nothing of
Longrein for that reason.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
import yaml

Json = dict[str, Any]

#: What a template may name.
FIELDS: dict[str, str] = {
    "rollout_id": "The rollout's id.",
    "attempt_id": "The attempt's id.",
    "job_name": "A name for the Job that no other attempt has: a DNS label.",
    "job_namespace": "The namespace that Jobs are made in.",
    "image": "The agent's image.",
    "task": "The task: its fields are named as task.FIELD.",
    "input": "The same as task, as Agent Lightning calls it.",
    "mode": "train or val.",
    "timeout_seconds": "Longest run of the attempt, a whole number.",
    "gateway_url": "The gateway's URL.",
    "openai_base_url": "Where the agent finds OpenAI's API.",
    "anthropic_base_url": "Where the agent finds Anthropic's API.",
    "events_url": "Where the agent posts its reward, if it does.",
    "token_secret": "Name of the Secret whose key `token` holds the attempt's token. The token itself is no field.",
}

#: Of a template's text, of what it renders, and of the JSON of its fields, in bytes.
LARGEST_TEMPLATE, LARGEST_OUTPUT, LARGEST_FIELDS = 256 * 1024, 1024 * 1024, 8 * 1024 * 1024
#: Seconds of processor time and of time, and bytes of memory, of rendering.
CPU_SECONDS, SECONDS, MEMORY = 2, 60.0, 1024 * 1024 * 1024


class JobTemplateError(Exception):
    """A template that gives no Job. The message names the line and what is wrong."""


def render_job_template(text: str, fields: Mapping[str, Any]) -> Json:
    """The Job that a template gives for `fields`, whose names are all in `FIELDS`; `input` follows from `task`.

    Raises `JobTemplateError`.
    """
    unknown = fields.keys() - FIELDS.keys()
    if unknown:
        raise ValueError(f"no field of a job template: {', '.join(sorted(unknown))}")
    if len(text.encode(errors="replace")) > LARGEST_TEMPLATE:
        raise JobTemplateError(f"the job template is larger than {LARGEST_TEMPLATE} bytes")
    given = dict(fields) | ({"input": fields["task"]} if "task" in fields else {})
    asked = json.dumps({"text": text, "fields": given}).encode()
    if len(asked) > LARGEST_FIELDS:
        raise JobTemplateError(f"the fields of the job template are larger than {LARGEST_FIELDS} bytes")
    try:
        # Isolated: nothing of this process's environment or folder can put a module in place of another.
        done = subprocess.run(
            [sys.executable, "-I", __file__], input=asked, capture_output=True, timeout=SECONDS, env={}, check=False
        )
    except subprocess.TimeoutExpired:
        raise JobTemplateError(f"the job template took longer than {SECONDS:g} s to render") from None
    if done.returncode != 0:
        raise JobTemplateError(
            f"the job template took more than {CPU_SECONDS} s of processor time or {MEMORY >> 20} MiB of memory to render"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise JobTemplateError(f"the job template {answer['error']}")
    return answer["job"]


# --- In the process of its own --------------------------------------------------------------------------------------


class _Refused(Exception):
    """What is wrong with a template, with the line in it where that is known."""


def render(text: str, fields: Mapping[str, Any]) -> Json:
    """As `render_job_template`, here and without its bounds of time and memory. Raises `JobTemplateError`."""
    values = _Values()
    try:
        rendered = _rendered(text, fields, values)
        job = _job(_parsed(rendered, values))
        if len(json.dumps(job)) > LARGEST_OUTPUT:
            raise _Refused(f"renders more than {LARGEST_OUTPUT} bytes")
        return job
    except _Refused as error:
        raise JobTemplateError(str(error)) from None


class _Values:
    """The values that a template has written, by their placeholders, which nobody can guess."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(12)
        self._values: list[Any] = []
        self._pattern = re.compile(rf"x{self._mark}n(\d+)x")

    def placeholder(self, value: Any) -> str:
        """What stands for a value in the text; a name in any place of a YAML document."""
        if isinstance(value, jinja2.Undefined):
            str(value)  # raises, as StrictUndefined does
        self._values.append(value)
        return f"x{self._mark}n{len(self._values) - 1}x"

    def alone(self, text: str) -> tuple[Any] | None:
        """The value, if the text is one placeholder and nothing else."""
        found = self._pattern.fullmatch(text)
        return (self._values[int(found[1])],) if found else None

    def filled(self, text: str) -> str:
        """The text with its values in their places."""
        return self._pattern.sub(lambda found: _as_text(self._values[int(found[1])]), text)

    def shown(self, text: str) -> str:
        """The text as an error shows it."""
        return self._pattern.sub("{{…}}", text)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _environment(values: _Values) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        finalize=values.placeholder,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        cache_size=0,
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    # Agent Lightning's templates quote by this; here nothing needs it.
    environment.filters["yaml_escape"] = _as_text
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    return environment


#: Statements that would make YAML out of values, or reach for other templates.
_NO_STATEMENT = (
    jinja2.nodes.Macro,
    jinja2.nodes.CallBlock,
    jinja2.nodes.FilterBlock,
    jinja2.nodes.AssignBlock,
    jinja2.nodes.Include,
    jinja2.nodes.Import,
    jinja2.nodes.FromImport,
    jinja2.nodes.Extends,
    jinja2.nodes.Block,
)


def _rendered(text: str, fields: Mapping[str, Any], values: _Values) -> str:
    environment = _environment(values)
    try:
        tree = environment.parse(text)
        for node in tree.find_all(_NO_STATEMENT):
            raise _Refused(f"line {node.lineno}: {type(node).__name__.lower()} is not for job templates")
        foreign = jinja2.meta.find_undeclared_variables(tree) - FIELDS.keys() - environment.globals.keys()
        for node in tree.find_all(jinja2.nodes.Name):
            if node.name in foreign:
                raise _Refused(f"line {node.lineno}: {node.name!r} is no field; there are {', '.join(FIELDS)}")
        template = environment.from_string(text)
        pieces, size = [], 0
        for piece in template.generate(**fields):
            size += len(piece.encode(errors="replace"))
            if size > LARGEST_OUTPUT:
                raise _Refused(f"renders more than {LARGEST_OUTPUT} bytes")
            pieces.append(piece)
        return "".join(pieces)
    except jinja2.TemplateSyntaxError as error:
        raise _Refused(f"line {error.lineno}: {error.message}") from None
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise _Refused(f"line {_line_of(error)}: {error or type(error).__name__}") from None


def _line_of(error: BaseException) -> int | str:
    """The line of the template that raised."""
    line: int | str = "?"
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


#: What YAML reads plain scalars and collections as.
_TAGS = frozenset("map seq str int float bool null timestamp".split())


class _Loader(yaml.SafeLoader):
    """YAML without references, in which one line could stand for millions."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise _Refused(f"renders YAML whose line {event.start_mark.line + 1} has a reference (*name); write it out")
        return super().compose_node(parent, index)


def _parsed(text: str, values: _Values) -> Any:
    lines = text.splitlines()
    loader = _Loader(text)
    try:
        if not loader.check_node():
            raise _Refused("renders nothing")
        node = loader.get_node()
        if loader.check_node():
            raise _Refused("renders more than one document; a rollout is one Job")
        return _value(node, loader, values)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = mark.line if mark is not None else 0
        shown = values.shown(lines[at].strip()) if at < len(lines) else "its end"
        raise _Refused(f"renders what is no YAML: {error.problem} (line {at + 1} of it: {shown[:200]})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _Refused(f"renders what is no YAML: {values.shown(str(error))[:200]}") from None
    finally:
        loader.dispose()


def _value(node: Any, loader: _Loader, values: _Values) -> Any:
    """What a node stands for, with its values in their places."""
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
        raise _Refused(f"renders YAML whose line {node.start_mark.line + 1} has the tag {node.tag}; leave it out")
    if isinstance(node, yaml.MappingNode):
        out: Json = {}
        for key, item in node.value:
            name = _value(key, loader, values)
            if not isinstance(name, str):
                raise _Refused(f"renders YAML whose line {key.start_mark.line + 1} has a key that is no text")
            if name in out:
                raise _Refused(f"renders YAML whose line {key.start_mark.line + 1} has the key {name!r} twice")
            out[name] = _value(item, loader, values)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, loader, values) for item in node.value]
    found = values.alone(node.value) if node.style is None else None
    if found is not None:
        return found[0]
    filled = values.filled(node.value)
    if filled != node.value:
        return filled
    value = loader.construct_object(node)
    # What JSON has no form for (dates, bytes, sets) is text in a manifest.
    return value if isinstance(value, (str, int, float, bool)) or value is None else node.value


def _job(value: Any) -> Json:
    if not isinstance(value, dict) or value.get("kind") != "Job" or value.get("apiVersion") != "batch/v1":
        raise _Refused("renders no Job: expected a mapping with apiVersion: batch/v1 and kind: Job")
    return value


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.loads(sys.stdin.buffer.read())
    try:
        answer: Json = {"job": render(asked["text"], asked["fields"])}
    except JobTemplateError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _main()
