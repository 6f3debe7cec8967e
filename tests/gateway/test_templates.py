"""The environment that templates are rendered in gives what jinja's own sandbox gives."""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.sandbox
import pytest

from longrein.gateway.loading import _environment

VALUES: list[dict[str, Any]] = [
    {"role": "user", "items": [1], "keys": 2},
    {},
    {"content": {"role": "inner"}, "__class__": "text", "_x": 1},
]


@pytest.mark.parametrize(
    "name", ["role", "items", "keys", "content", "content.role", "__class__", "_x", "pop", "missing"]
)
@pytest.mark.parametrize("value", VALUES)
def test_a_name_means_what_it_means_in_the_sandbox(value: dict[str, Any], name: str) -> None:
    text = f"{{{{ v.{name} }}}}|{{{{ v.{name} is defined }}}}"

    def shown(environment: jinja2.Environment) -> str:
        try:
            return environment.from_string(text).render(v=value).split(" at 0x")[0]
        except jinja2.TemplateError as error:
            return f"{type(error).__name__}: {error}"

    assert shown(_environment()) == shown(jinja2.sandbox.ImmutableSandboxedEnvironment())
