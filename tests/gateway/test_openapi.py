"""The OpenAPI document says what the gateway does: Schemathesis asks a real one by it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from longrein import records
from longrein.gateway.dialects import chat, completions, messages, responses
from longrein.gateway.openapi import document
from longrein.gateway.operations import OPERATIONS, Who

from .running import RunningGateway, running_gateway

EXAMPLES = int(os.environ.get("LONGREIN_FUZZ_EXAMPLES", "6"))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    # Held calls and engines that are registered at random are not waited for.
    options = ["gate.hold_seconds=0.05", "gateway.retry_grace=0"]
    with running_gateway(tmp_path_factory.mktemp("openapi"), options) as running:
        yield running


def test_the_document_is_served_to_anyone(gateway: RunningGateway) -> None:
    answer = httpx.get(f"{gateway.url}/openapi.json")
    assert answer.status_code == 200
    assert answer.json() == json.loads(msgspec.json.encode(document()))


def test_it_has_every_operation_with_its_key_and_its_errors() -> None:
    paths = document()["paths"]
    assert {(method.upper(), path) for path, some in paths.items() for method in some} == set(OPERATIONS)
    ids = [one["operationId"] for some in paths.values() for one in some.values()]
    assert len(set(ids)) == len(ids)
    for (method, path), operation in OPERATIONS.items():
        said = paths[path][method.lower()]
        keyless = operation.who is Who.anyone
        assert said["security"] == ([] if keyless else [{"bearer": []}, {"api_key": []}])
        assert ({"401", "403"} <= set(said["responses"])) is not keyless
        assert [p["name"] for p in said.get("parameters", []) if p["in"] == "path"] == [
            part.strip("{}") for part in path.split("/") if part.startswith("{")
        ]


def test_it_has_every_field_of_the_dialects_and_the_records() -> None:
    schemas = document()["components"]["schemas"]
    for dialect in (chat, completions, responses, messages):
        said = schemas[f"{dialect.name}Request"]
        assert set(said["properties"]) == {*dialect.HONOURED, *dialect.IGNORED, *dialect.NEUTRAL}
        assert said["additionalProperties"] is False
    for record in (records.Rollout, records.NewRollout, records.Call, records.Attempt, records.Event):
        assert set(schemas[record.__name__]["properties"]) == set(record.__struct_fields__)


def test_every_query_parameter_is_known_to_its_route(gateway: RunningGateway) -> None:
    rollout, _ = gateway.rollout()
    for (method, path), operation in OPERATIONS.items():
        for parameter in operation.query:
            known = {"state_in": "queuing", "attempt": "0", "format": "triplet", "event_type": "x", "wait": "0"}
            query = {parameter.name: known.get(parameter.name, "1")}
            answer = gateway.http.request(method, path.format(rollout_id=rollout), params=query)
            assert answer.status_code == 200, (path, parameter.name, answer.text)


def operations() -> list[Any]:
    """What Schemathesis reads out of the document."""
    schema = schemathesis.openapi.from_dict(json.loads(msgspec.json.encode(document())))
    found: Any = schema.get_all_operations()
    return [one.ok() for one in found]


@pytest.mark.parametrize("operation", operations(), ids=lambda one: one.label)
def test_answers_are_as_described_whatever_is_asked(gateway: RunningGateway, operation: Any) -> None:
    """No failure inside, and status, type and form as the document says; with the run key, at rollouts that are there."""
    rollout, token = gateway.rollout()
    who = OPERATIONS[operation.method.upper(), operation.path].who
    key = token if who is Who.token else gateway.http.headers["authorization"].removeprefix("Bearer ")

    # There is nothing to get wrong about an operation without parameters.
    takes = operation.method.upper() != "HEAD" and (operation.path_parameters or operation.query or operation.body)
    modes = list(GenerationMode) if takes else [GenerationMode.POSITIVE]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=EXAMPLES <= 10,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]), known=st.booleans())
    def check(case: Any, known: bool) -> None:
        if known and "rollout_id" in case.path_parameters:
            ids = {"rollout_id": rollout, "attempt_id": "0", "mode": "train"}
            case.path_parameters |= {name: ids[name] for name in case.path_parameters}
        if "wait" in (case.query or {}):
            case.query["wait"] = 0
        case.call_and_validate(
            base_url=gateway.url,
            headers={"authorization": f"Bearer {key}"},
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_headers_conformance,
                response_schema_conformance,
            ],
        )

    check()
    gateway.http.post("/proxy/resume")
    assert httpx.get(f"{gateway.url}/healthz").json() == {"status": "ok"}
