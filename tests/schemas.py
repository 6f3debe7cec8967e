"""Random JSON schemas whose values are short, so that a random model comes to their end."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

KEYS = ["a", "b", "city", "naïve key", 'quo"te']


def _scalars() -> st.SearchStrategy[Json]:
    low = st.integers(-50, 50)
    return st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, low, low),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
        st.just({"type": "string", "pattern": "^[a-c]{2,4}$"}),
        st.lists(st.sampled_from(["x", "é", 3, True, "a b"]), min_size=1, max_size=3, unique_by=repr).map(
            lambda values: {"enum": values}
        ),
    )


def _objects(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    def build(properties: dict[str, Json], optional: set[str]) -> Json:
        required = [name for name in properties if name not in optional]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    properties = st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    return st.builds(build, properties, st.sets(st.sampled_from(KEYS), max_size=2))


def _arrays(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def schemas() -> st.SearchStrategy[Json]:
    """Any of them."""
    return st.recursive(_scalars(), lambda inner: st.one_of(_objects(inner), _arrays(inner)), max_leaves=5)


def object_schemas() -> st.SearchStrategy[Json]:
    """Those of objects, as a tool's arguments are."""
    return _objects(schemas())
