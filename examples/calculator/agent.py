"""An agent with a calculator, written with the OpenAI Agents SDK: `python agent.py "Ann has 37 apples and ..."`.

It talks to whatever OPENAI_BASE_URL and OPENAI_API_KEY name and prints its final answer.
"""

import ast
import operator
import os
import sys

from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.tracing import set_trace_provider
from agents.tracing.provider import DefaultTraceProvider
from openai import AsyncOpenAI, DefaultAsyncHttpx2Client

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(expression: str) -> float:
    """The value of numbers joined by + - * / and brackets. Raises ValueError, SyntaxError or ZeroDivisionError."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError(f"not arithmetic: {ast.unparse(node)}")

    if len(expression) > 200:
        raise ValueError("longer than 200 characters")
    return value(ast.parse(expression.strip(), mode="eval").body)


@function_tool(failure_error_function=lambda context, error: "error")
def calculator(expression: str) -> str:
    """Work out an expression"""
    result = evaluate(expression)
    return str(int(result)) if result == int(result) else f"{result:.2f}"


def main(question: str) -> None:
    # No traces, and no certificates read for an endpoint that has none: both would cost more than the agent's own work.
    set_trace_provider(DefaultTraceProvider())
    set_tracing_disabled(True)
    http = DefaultAsyncHttpx2Client(verify=os.environ.get("OPENAI_BASE_URL", "").startswith("https"))
    agent = Agent(
        name="Calculator",
        instructions="Use the tool, then answer with the number.",
        tools=[calculator],
        model=OpenAIChatCompletionsModel("policy", AsyncOpenAI(http_client=http)),
        model_settings=ModelSettings(max_tokens=40),
    )
    try:
        print(Runner.run_sync(agent, question, max_turns=3).final_output)
    except AgentsException as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
