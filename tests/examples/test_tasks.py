"""The examples' tasks, teachers and graders agree with each other, and no split shares a question with another."""

import itertools

import pytest

from .loaded import load

NAMES = ["calculator", "tiny"]
TOOLS = {
    "calculator": [{"function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}],
    "tiny": [{"function": {"name": "read", "parameters": {"properties": {"sheet": {}, "row": {}}}}}],
}


@pytest.mark.parametrize("example", NAMES)
def test_splits_share_no_question_and_held_out_is_the_same_for_every_seed(
    monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    tasks = load(monkeypatch, example, "tasks")
    questions = {
        name: [{task["question"] for task in getattr(tasks, name)(seed)} for seed in (0, 1)]
        for name in ("train", "dev", "held_out")
    }
    for one, other in itertools.combinations(questions, 2):
        assert not set.union(*questions[one]) & set.union(*questions[other])
    assert list(tasks.held_out(0)) == list(tasks.held_out(1))
    assert list(tasks.dev(0)) == list(tasks.dev(1))
    assert list(tasks.train(0)) == list(tasks.train(0))
    assert list(tasks.train(0)) != list(tasks.train(1))


def test_there_are_200_held_out_word_problems_of_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = load(monkeypatch, "calculator", "tasks")
    held_out = list(tasks.held_out(0))
    assert len(held_out) == len({task["question"] for task in held_out}) == 200
    signs = {"".join(c for c in tasks.expression_of(task["question"]) if not c.isdigit()) for task in held_out}
    assert signs == {"+", "-", "+-", "++", "*", "*+", "*-", "/"}


def test_the_calculator_teacher_is_always_right(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, teacher, grader = (load(monkeypatch, "calculator", name) for name in ("tasks", "teacher", "grader"))
    for task in itertools.islice(tasks.train(3), 200):
        messages = [{"role": "user", "content": task["question"]}]
        messages.append(teacher.reply(messages, TOOLS["calculator"]))
        (call,) = messages[-1]["tool_calls"]
        assert call["function"]["arguments"] == f'{{"expression": "{tasks.expression_of(task["question"])}"}}'
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(task["answer"])})
        messages.append(teacher.reply(messages, TOOLS["calculator"]))
        assert grader.grade(task, messages, "", 0)["reward"] == 1.0
        assert eval(tasks.expression_of(task["question"])) == task["answer"] >= 0
    with pytest.raises(ValueError, match="none of this example's problems"):
        tasks.expression_of("How are you?")


@pytest.mark.parametrize(
    ("result", "final", "reward"),
    [
        ("76", "76", 1.0),
        ("76", "Ann has 76 apples.", 1.0),
        ("76", "76.0", 1.0),
        ("76", "75", 0.0),
        ("76", "37+39 = 76", 0.0),
        ("76", "", 0.0),
        ("error", "76", 0.0),
        (None, "76", 0.0),
    ],
)
def test_only_a_right_answer_with_a_result_is_rewarded(
    monkeypatch: pytest.MonkeyPatch, result: str | None, final: str, reward: float
) -> None:
    grader = load(monkeypatch, "calculator", "grader")
    transcript: list[dict] = [{"role": "user", "content": "Ann has 37 apples and finds 39 more."}]
    if result is not None:
        transcript += [{"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": result}]
    transcript.append({"role": "assistant", "content": final})
    assert grader.grade({"question": "", "answer": 76}, transcript, "", 0)["reward"] == reward
    assert grader.grade({"question": "", "answer": 76}, transcript[:-1], "", 1)["reward"] == 0.0


def test_the_tiny_teacher_is_right_one_time_in_four(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, teacher, grader = (load(monkeypatch, "tiny", name) for name in ("tasks", "teacher", "grader"))
    rewards = []
    for task in itertools.islice(tasks.train(0), 400):
        messages = [{"role": "user", "content": task["question"]}]
        messages.append(teacher.reply(messages, TOOLS["tiny"]))
        numbers = dict(entry.split("=") for entry in task["sheets"].split())
        arguments = messages[-1]["tool_calls"][0]["function"]["arguments"]
        (sheet,) = [name for name in numbers if f'"{name}"' in arguments]
        assert f'"{task["item"]}"' in arguments
        messages.append({"role": "tool", "content": numbers[sheet]})
        messages.append(teacher.reply(messages, TOOLS["tiny"]))
        rewards.append(grader.grade(task, messages, "", 0)["reward"])
    assert 0.15 < sum(rewards) / len(rewards) < 0.35
