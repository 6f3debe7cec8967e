"""Any bytes as a body: JSON within the bounds, or an error."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.gateway.bounds import MOST_DEPTH, BadJson, read_json

from .fuzzing import fuzzed

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


@fuzzed
@given(values, st.integers(0, 2 * MOST_DEPTH))
def test_json_within_the_bounds_is_read_as_it_is(value: Any, wraps: int) -> None:
    for _ in range(wraps):
        value = [value]
    text = json.dumps(value)
    if depth_of(value) > MOST_DEPTH or any(not -(2**63) <= one < 2**64 for one in integers_of(value)):
        with pytest.raises(BadJson):
            read_json(text.encode())
    else:
        assert read_json(text.encode()) == value
        msgspec.json.encode(value)  # and can be written down again


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def integers_of(value: Any) -> list[int]:
    if isinstance(value, (dict, list)):
        return [one for item in (value.values() if isinstance(value, dict) else value) for one in integers_of(item)]
    return [value] if type(value) is int else []


@fuzzed
@given(st.binary())
def test_any_bytes_are_json_or_an_error(content: bytes) -> None:
    with suppress(BadJson):
        read_json(content)
