"""The OpenAPI document of the gateway (`GET /openapi.json`), made from its operations and the types of its records.

The records' schemas are msgspec's own. Of a model request it says what the dialect reads: which fields are honoured, with
their types, which are ignored, and which are accepted with certain values only; every other field is refused.
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType
from typing import Any

import msgspec

from longrein import __version__
from longrein.gateway.dialects import LONGEST_STOP, MOST_CHOICES, MOST_STOPS, MOST_TOP_LOGPROBS, messages
from longrein.gateway.operations import OPERATIONS, Operation, Parameter, Who

Json = dict[str, Any]

_PATH_PARAMETERS: dict[str, Json] = {
    "rollout_id": {"type": "string", "minLength": 1},
    "attempt_id": {"type": "string", "minLength": 1},
    "mode": {"enum": ["train", "val"]},
}
_STATUSES = {
    200: "Done",
    201: "Made",
    204: "Done; no body",
    400: "The request cannot be read or honoured; the message names what is wrong",
    401: "No key that is known",
    403: "The key may not do this, or the attempt's budget is used up",
    404: "No such rollout, attempt or mode",
    408: "The body took too long to arrive",
    409: "The record's present state does not allow it",
    413: "The body is too large",
    414: "The URL is too long",
    422: "The body or a parameter is not of the form that is described here",
    429: "Too many calls at once, or the model is paused; Retry-After says when to ask again",
    431: "The headers are too many or too large",
    502: "The model's endpoint failed",
    503: "The record or the model is not there now",
}

_STOP: Json = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
_STOPS: Json = {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}
_OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
_POSITIVE: Json = {"type": "integer", "minimum": 1}
_BOOLEAN: Json = {"type": "boolean"}
_TOP: Json = {"type": "integer", "minimum": 0, "maximum": MOST_TOP_LOGPROBS}
_TEXT_OR_OBJECTS: Json = {"anyOf": [{"type": "string", "minLength": 1}, {**_OBJECTS, "minItems": 1}]}

#: Types of honoured fields, whatever the dialect.
_HONOURED: dict[str, Json] = {
    "model": {"type": "string", "description": "Any name means the model of the attempt's role."},
    "messages": {**_OBJECTS, "minItems": 1},
    "input": _TEXT_OR_OBJECTS,
    "prompt": {
        "description": "A text, token ids, or a list of either.",
        "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1}],
    },
    "system": {"anyOf": [{"type": "string"}, _OBJECTS]},
    "instructions": {"type": "string"},
    "tools": _OBJECTS,
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
    "parallel_tool_calls": _BOOLEAN,
    "response_format": {"type": "object", "required": ["type"]},
    "text": {"type": "object"},
    "output_config": {"type": "object"},
    "stream": _BOOLEAN,
    "stream_options": {"type": "object", "properties": {"include_usage": _BOOLEAN}},
    "max_tokens": _POSITIVE,
    "max_completion_tokens": _POSITIVE,
    "max_output_tokens": _POSITIVE,
    "temperature": {
        "type": "number",
        "minimum": 0,
        "maximum": 2,
        "description": "Checked; the run file decides for every request of a mode alike.",
    },
    "top_p": {"type": "number", "minimum": 0, "maximum": 1, "description": "Only 1 in mode train."},
    "top_k": {"type": "integer", "description": "Only 0 in mode train."},
    "stop": {"anyOf": [_STOP, _STOPS]},
    "stop_sequences": _STOPS,
    "n": {"type": "integer", "minimum": 1, "maximum": MOST_CHOICES},
    "logprobs": _BOOLEAN,
    "top_logprobs": _TOP,
    "return_token_ids": _BOOLEAN,
    "previous_response_id": {"type": "string"},
    "include": {"type": "array", "items": {"type": "string"}},
}
#: Where a dialect has another type.
_OF_DIALECT: dict[tuple[str, str], Json] = {
    ("completions", "logprobs"): _TOP,
    ("messages", "temperature"): {**_HONOURED["temperature"], "maximum": 1},
    ("messages", "tool_choice"): {"type": "object"},
}
_REQUIRED = {"chat": ["messages"], "completions": ["prompt"], "responses": ["input"], "messages": ["messages"]}


@cache
def document() -> Json:
    """The OpenAPI 3.1 document."""
    types = [one for operation in OPERATIONS.values() for one in (operation.body, operation.answer) if _is_record(one)]
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    records = {repr(kind): schema for kind, schema in zip(types, found, strict=True)}
    dialects = {operation.body.name: operation.body for operation in OPERATIONS.values() if _is_dialect(operation.body)}
    components |= {f"{name}Request": _request(module) for name, module in dialects.items()}
    components |= _ERRORS
    paths: dict[str, Json] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, records)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Longrein gateway",
            "version": __version__,
            "description": "Stands where the model's endpoint is, and keeps every token that is sampled there.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _is_dialect(kind: Any) -> bool:
    return isinstance(kind, ModuleType)


def _is_record(kind: Any) -> bool:
    return kind is not None and not isinstance(kind, (dict, ModuleType))


def _operation(method: str, path: str, operation: Operation, records: dict[str, Json]) -> Json:
    names = re.findall(r"\{(\w+)\}", path)
    parameters = [{"name": n, "in": "path", "required": True, "schema": _PATH_PARAMETERS[n]} for n in names]
    parameters += [_parameter(one) for one in operation.query]
    out: Json = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_")
        + ("_root" if path[-1] == "/" else ""),
        "summary": operation.summary,
        "security": [] if operation.who is Who.anyone else [{"bearer": []}, {"api_key": []}],
        "responses": {str(operation.status): _answer(operation, records)},
    }
    if operation.who is not Who.anyone:
        out["description"] = f"With an attempt's token: {operation.who.value}."
    if parameters:
        out["parameters"] = parameters
    if operation.body is not None:
        schema = records[repr(operation.body)] if _is_record(operation.body) else _reference(operation.body)
        content = {"application/json": {"schema": schema}}
        out["requestBody"] = {"required": not operation.optional, "content": content}
    shape = _shape(path)
    for status in sorted(_errors(path, operation)):
        content = {} if method == "HEAD" else {"content": {"application/json": {"schema": shape}}}
        out["responses"][str(status)] = {"description": _STATUSES[status], **content}
    return out


def _parameter(one: Parameter) -> Json:
    repeated = {"style": "form", "explode": True} if one.schema.get("type") == "array" else {}
    return {"name": one.name, "in": "query", "description": one.what, "schema": one.schema, **repeated}


def _reference(dialect: ModuleType) -> Json:
    return {"$ref": f"#/components/schemas/{dialect.name}Request"}


def _answer(operation: Operation, records: dict[str, Json]) -> Json:
    answer: Json = {"description": _STATUSES[operation.status]}
    if operation.answer is not None:
        schema = records[repr(operation.answer)] if _is_record(operation.answer) else operation.answer
        answer["content"] = {"application/json": {"schema": schema}}
        if operation.streams:
            answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return answer


def _errors(path: str, operation: Operation) -> set[int]:
    """Statuses of errors: those of every request, and those that follow from what the operation is."""
    statuses = {400, 414, 431, *operation.errors}
    if operation.who is not Who.anyone:
        statuses |= {401, 403, 503}
    if operation.body is not None:
        statuses |= {408, 413} | ({422} if _is_record(operation.body) else set())
    if operation.query or "/attempt/{attempt_id}" in path:
        statuses.add(422)
    return statuses


def _shape(path: str) -> Json:
    """Of an error: the dialect's on the model's paths, `{"detail": …}` on all others."""
    if path.endswith(("/v1/messages", "/v1/messages/count_tokens")):
        name = "AnthropicError"
    else:
        name = "OpenAIError" if path.startswith(("/v1/", "/proxy/rollout/")) else "Error"
    return {"$ref": f"#/components/schemas/{name}"}


def _request(dialect: ModuleType) -> Json:
    """The schema of a dialect's request, from the tables that its parser reads by. Null is as good as absent."""
    properties: Json = {}
    for name in dialect.HONOURED:
        schema = _OF_DIALECT.get((dialect.name, name), _HONOURED[name])
        properties[name] = schema if name in _REQUIRED[dialect.name] else {"anyOf": [schema, {"type": "null"}]}
    for name in dialect.IGNORED:
        properties[name] = {"description": "Ignored: it changes nothing about what is sampled."}
    for name, values in dialect.NEUTRAL.items():
        properties[name] = {"enum": [*values, None], "description": "Any other value is refused."}
    return {
        "type": "object",
        "required": _REQUIRED[dialect.name],
        "properties": dict(sorted(properties.items())),
        "additionalProperties": False,
    }


_NULLABLE: Json = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERRORS: dict[str, Json] = {
    "Error": {"type": "object", "required": ["detail"], "properties": {"detail": {"type": "string"}}},
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": _NULLABLE,
                    "code": _NULLABLE,
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"enum": sorted({*messages.ERROR_TYPES.values(), "api_error"})}, "message": {}},
            },
        },
    },
}
