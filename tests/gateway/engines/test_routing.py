"""Rendezvous hashing: who goes where, and who moves when endpoints come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longrein.gateway.engines.routing import choose_endpoint
from longrein.records import ModelEndpoint

names = st.lists(st.text("abcdef0123456789", min_size=1, max_size=8), min_size=1, max_size=8, unique=True)
keys = st.lists(st.text(max_size=12), min_size=1, max_size=40)


def at(name: str) -> ModelEndpoint:
    return ModelEndpoint("m", f"http://{name}")


@given(names, st.text("xyz", min_size=1, max_size=4), keys)
def test_an_added_endpoint_takes_its_share_and_moves_nobody_else(hosts: list[str], new: str, asked: list[str]) -> None:
    before = [at(host) for host in hosts]
    after = [*before, at(new)]
    for key in asked:
        assert choose_endpoint(after, key).endpoint in {f"http://{new}", choose_endpoint(before, key).endpoint}


@given(names, keys, st.randoms())
def test_neither_order_nor_version_nor_protocol_matters(hosts: list[str], asked: list[str], random) -> None:  # type: ignore[no-untyped-def]
    endpoints = [at(host) for host in hosts]
    shuffled = [ModelEndpoint("m", e.endpoint, version=3, protocol="vllm") for e in endpoints]
    random.shuffle(shuffled)
    for key in asked:
        assert choose_endpoint(endpoints, key).endpoint == choose_endpoint(shuffled, key).endpoint


def test_shares_are_about_equal() -> None:
    endpoints = [at(f"host{i}") for i in range(4)]
    counts = {e.endpoint: 0 for e in endpoints}
    for i in range(4000):
        counts[choose_endpoint(endpoints, f"rollout{i}").endpoint] += 1
    assert all(850 < count < 1150 for count in counts.values())  # 5 standard deviations are 137
