"""An agent that reads numbers off sheets: `python agent.py "height of fig" fig "red=417 blue=152 green=830"`."""

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


def main(question: str, item: str, sheets: str) -> None:
    numbers = dict(entry.split("=") for entry in sheets.split())

    @function_tool(failure_error_function=lambda context, error: "none")
    def read(sheet: str, row: str) -> str:
        return numbers.get(sheet, "none") if row == item else "none"

    # No traces, and no certificates read for an endpoint that has none: both would cost more than the agent's own work.
    set_trace_provider(DefaultTraceProvider())
    set_tracing_disabled(True)
    http = DefaultAsyncHttpx2Client(verify=os.environ.get("OPENAI_BASE_URL", "").startswith("https"))
    agent = Agent(
        name="Reader",
        tools=[read],
        model=OpenAIChatCompletionsModel("policy", AsyncOpenAI(http_client=http)),
        model_settings=ModelSettings(max_tokens=64),
    )
    try:
        print(Runner.run_sync(agent, question, max_turns=3).final_output)
    except AgentsException as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
