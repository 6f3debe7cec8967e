"""Tasks from files and functions, and the order in which they are visited."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.config import ConfigError
from longrein.tasks import TaskOrder, load_tasks


def read(source: str, folder: Path, seed: int = 0) -> list[dict]:
    return load_tasks(source, folder=str(folder), seed=seed, option="task.train")


def test_a_json_lines_file_is_read_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\n\n{"b": "\u2028ü"}\n', encoding="utf-8")
    assert read("tasks.jsonl", tmp_path) == [{"a": 1}, {"b": "\u2028ü"}]
    assert read(str(tmp_path / "tasks.jsonl"), Path("/")) == [{"a": 1}, {"b": "\u2028ü"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [('{"a": 1', "not valid JSON"), ("[1]", "this is a list"), ("3", "this is a number"), ("null", "this is null")],
)
def test_a_broken_line_is_named_with_file_and_number(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(f'{{"a": 1}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=said) as caught:
        read("tasks.jsonl", tmp_path)
    assert f"task.train: {file}:3: " in str(caught.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:1: not valid JSON"):
        read("tasks.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("source", "said"),
    [("", "no tasks are named"), ("none.jsonl", "no such file"), ("empty.jsonl", "holds no tasks")],
)
def test_what_is_not_there_is_an_error(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=said):
        read(source, tmp_path)


def test_a_function_is_called_with_the_seed(tmp_path: Path) -> None:
    (tmp_path / "make_tasks_a.py").write_text(
        "def make(seed):\n    return ({'n': seed + k, 't': (1, 2)} for k in range(3))\n"
    )
    assert read("make_tasks_a:make", tmp_path, seed=7) == [{"n": n, "t": [1, 2]} for n in (7, 8, 9)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1]", "task 0 is a number, not a dict"),
        ("return [{'a': object()}]", "task 0 has no JSON form"),
        ("return []", "made no tasks"),
        ("raise ValueError('no luck')", "ValueError: no luck"),
    ],
)
def test_what_a_function_does_wrong_is_named(
    tmp_path: Path, body: str, said: str, request: pytest.FixtureRequest
) -> None:
    module = f"make_tasks_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(f"def make(seed):\n    {body}\n")
    with pytest.raises(ConfigError, match=said):
        read(f"{module}:make", tmp_path)


def test_a_function_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "make_tasks_b.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "make_tasks_c.py").write_text("")
    with pytest.raises(ConfigError, match=r"task\.train: no module 'make_tasks_none'"):
        read("make_tasks_none:make", tmp_path)
    with pytest.raises(ConfigError, match="importing make_tasks_b failed: No module named 'a_module_that_nobody_has'"):
        read("make_tasks_b:make", tmp_path)
    with pytest.raises(ConfigError, match="module make_tasks_c has no function 'make'"):
        read("make_tasks_c:make", tmp_path)


@given(count=st.integers(1, 30), seed=st.integers(0, 5), epochs=st.integers(1, 4), shuffle=st.booleans())
def test_every_epoch_visits_every_task_once(count: int, seed: int, epochs: int, shuffle: bool) -> None:
    order = TaskOrder(count, seed=seed, shuffle=shuffle)
    for _ in range(epochs):
        visited = [order.next() for _ in range(count)]
        assert sorted(visited) == list(range(count))
        assert shuffle or visited == sorted(visited)


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def epochs(seed: int) -> list[list[int]]:
        order = TaskOrder(50, seed=seed, shuffle=True)
        return [[order.next() for _ in range(50)] for _ in range(2)]

    assert epochs(1) == epochs(1)
    assert len({tuple(e) for e in itertools.chain(epochs(1), epochs(2))}) == 4


@given(count=st.integers(1, 10), before=st.integers(0, 25), returned=st.lists(st.integers(0, 9), max_size=3))
def test_a_restored_order_goes_on_where_it_was(count: int, before: int, returned: list[int]) -> None:
    order = TaskOrder(count, seed=3, shuffle=True)
    for _ in range(before):
        order.next()
    for index in returned:
        order.put_back(index)
    restored = TaskOrder(count, seed=3, shuffle=True)
    restored.load_state_dict(json.loads(json.dumps(order.state_dict())))
    ahead = [order.next() for _ in range(20)]
    assert ahead[: len(returned)] == returned
    assert [restored.next() for _ in range(20)] == ahead
