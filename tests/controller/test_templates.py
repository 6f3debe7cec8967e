"""Job templates: a task's text never becomes YAML or code, and a template costs a bounded time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longrein.controller import templates
from longrein.controller.templates import FIELDS, JobTemplateError, render, render_job_template

JOB = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ job_name }}
  labels: {longrein.io/rollout-id: "{{ rollout_id }}"}
spec:
  backoffLimit: 0
  activeDeadlineSeconds: {{ timeout_seconds }}
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: agent
          image: {{ image }}
          args: ["solve", "--question={{ task.question }}", "{{ task.question | upper }}"]
          env:
            - {name: OPENAI_BASE_URL, value: "{{ openai_base_url }}"}
            - name: OPENAI_API_KEY
              valueFrom: {secretKeyRef: {name: "{{ token_secret }}", key: token}}
            - name: QUESTION
              value: {{ task.question }}
{% for name in task.get("extra", []) %}
            - name: EXTRA_{{ loop.index }}
              value: {{ name }}
{% endfor %}
"""


def fields(question: Any, **task: Any) -> dict[str, Any]:
    task = {"question": question, **task}
    return {
        "rollout_id": "r-1",
        "attempt_id": "0",
        "job_name": "longrein-r-1-0",
        "image": "registry/agent:1",
        "task": task,
        "input": task,
        "timeout_seconds": 900,
        "openai_base_url": "http://gateway:8080/v1",
        "token_secret": "longrein-r-1-0",
    }


def job(spec: str) -> str:
    return "apiVersion: batch/v1\nkind: Job\n" + spec


HOSTILE = [
    'x\n        - name: evil\n          image: evil\n          securityContext: {privileged: true}',
    '", "--evil", "',
    "'] } }\n---\napiVersion: v1\nkind: Secret",
    "}}, {name: LD_PRELOAD, value: /evil.so}",
    "{{ 7 * 7 }} {% for x in range(9) %}{{ x }}{% endfor %} {{ ''.__class__.__mro__ }}",
    "*anchor &anchor !!python/object/apply:os.system ['id']",
    "yes", "null", "0x10", "2026-11-30", "# comment", "a: b", "|\n  block", "\u2028\x85\ufeff\x00\x7f", "%YAML 1.1\n--- !!map",
]  # fmt: skip


def spoken(question: str) -> dict[str, Any]:
    """The container that the template has to give for a question, whatever it says."""
    return {
        "name": "agent",
        "image": "registry/agent:1",
        "args": ["solve", f"--question={question}", question.upper()],
        "env": [
            {"name": "OPENAI_BASE_URL", "value": "http://gateway:8080/v1"},
            {"name": "OPENAI_API_KEY", "valueFrom": {"secretKeyRef": {"name": "longrein-r-1-0", "key": "token"}}},
            {"name": "QUESTION", "value": question},
        ],
    }


def test_a_template_gives_a_job() -> None:
    made = render_job_template(JOB, {k: v for k, v in fields("1+1", extra=["a", 2]).items() if k != "input"})
    assert made["metadata"] == {"name": "longrein-r-1-0", "labels": {"longrein.io/rollout-id": "r-1"}}
    assert made["spec"]["activeDeadlineSeconds"] == 900
    (container,) = made["spec"]["template"]["spec"]["containers"]
    said = spoken("1+1")
    said["env"] += [{"name": "EXTRA_1", "value": "a"}, {"name": "EXTRA_2", "value": 2}]
    assert container == said


@pytest.mark.parametrize("question", HOSTILE)
def test_a_tasks_text_stays_text(question: str) -> None:
    made = render(JOB, fields(question))
    assert made["spec"]["template"]["spec"]["containers"] == [spoken(question)]


@settings(max_examples=60, deadline=None)
@given(st.text() | st.lists(st.sampled_from(list("\n\"'{}[]:,-#&*!|>%@` x")), max_size=30).map("".join))
@example("\ud800")
def test_no_text_of_a_task_changes_the_form_of_a_job(question: str) -> None:
    made = render(JOB, fields(question))
    assert made["spec"]["template"]["spec"]["containers"] == [spoken(question)]


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_an_expression_alone_is_its_value(value: Any) -> None:
    made = render(job("bare: {{ task.question }}\ntext: '<{{ task.question }}>'"), fields(value))
    assert made["bare"] == value
    assert made["text"] == f"<{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}>"


def test_agent_lightnings_templates_render_as_they_are() -> None:
    made = render(job('name: {{ job_name }}\nargs: ["{{ input.question | yaml_escape }}"]'), fields('say "hi"\n- x'))
    assert made["args"] == ['say "hi"\n- x']


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("a: {{ task.missing }}", r"line 3: .*has no attribute 'missing'"),
        ("a: 1\nb: {{ tsak.question }}", r"line 4: 'tsak' is no field; there are rollout_id, "),
        ("a: {{ 1 }", r"line 3: "),
        ("a: 1\nb: {% if %}", r"line 4: "),
        ("a: {{ 1 / 0 }}", r"line 3: division by zero"),
        ("a: {{ task.__class__ }}", r"line 3: .*__class__"),
        ("a: {{ ''.__class__.__mro__[1].__subclasses__() }}", r"line 3: "),
        ("a: {{ task.update({}) }}", r"line 3: .*unsafe"),
        ("a: {{ self.__init__.__globals__ }}", r"line 3: .*unsafe"),
        ("a: {{ config }}", r"line 3: 'config' is no field"),
        ("a: {{ namespace.__init__ }}", r"line 3: "),
        ("{% include '/etc/passwd' %}", r"line 3: include is not for job templates"),
        ("{% import 'os' as os %}", r"line 3: import is not for job templates"),
        ("{% macro m() %}a: 1{% endmacro %}{{ m() }}", r"line 3: macro is not for job templates"),
        ("{% set x %}a: 1{% endset %}{{ x }}", r"line 3: assignblock is not for job templates"),
        ("a: [1", r"no YAML: .*\(line 3 of it: "),
        (
            "a: {{ task.question }}: b",
            r"no YAML: mapping values are not allowed here \(line 3 of it: a: \{\{…\}\}: b\)",
        ),
        ("a: &x [1]\nb: *x", r"line 4 has a reference"),
        ("a: 1\na: 2", r"line 4 has the key 'a' twice"),
        ("1: a", r"line 3 has a key that is no text"),
        ("a: 1\n---\nb: 1", r"more than one document"),
        ("a: !!python/object/apply:os.system ['id']", r"line 3 has the tag .*os.system"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(spec: str, said: str) -> None:
    with pytest.raises(JobTemplateError, match=said):
        render(job(spec), fields("q"))


@pytest.mark.parametrize("text", ["kind: Job", "[]", "", "apiVersion: v1\nkind: Pod", "text"])
def test_what_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(JobTemplateError, match=r"renders (no Job|nothing)"):
        render(text, fields("q"))


@pytest.mark.parametrize(
    "spec",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}",
        "a: {{ 'x' * 9999999999 }}",
        "a: {{ 9 ** (9 ** (9 ** 9)) }}",
        "a: {{ '%0999999999d' % 1 }}",
        "a: {{ '' | center(9999999999) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}- a\n{% endfor %}{% endfor %}",
        "a: {{ task.question * 40 }}",
    ],
)
def test_a_template_without_end_is_ended(spec: str) -> None:
    with pytest.raises(JobTemplateError, match=r"took more than|renders more than|line 3|larger than"):
        render_job_template(job(spec), fields("x" * 100_000))


def test_fields_are_bounded_and_named() -> None:
    with pytest.raises(JobTemplateError, match="larger than"):
        render_job_template(job("a: 1"), fields("x" * templates.LARGEST_FIELDS))
    with pytest.raises(JobTemplateError, match="larger than"):
        render_job_template(job("#" * templates.LARGEST_TEMPLATE), fields("q"))
    with pytest.raises(ValueError, match="no field of a job template: token"):
        render_job_template(job("a: 1"), {"token": "secret"})
    assert "token" not in FIELDS
