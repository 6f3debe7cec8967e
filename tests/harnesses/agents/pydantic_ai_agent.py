"""An agent of Pydantic AI: `pydantic_ai_agent.py chat|responses TASK`; prints its answer."""

import sys

from pydantic_ai import Agent  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # type: ignore[import-not-found]
from shell import bash

dialect, task = sys.argv[1:]
model = OpenAIChatModel("policy") if dialect == "chat" else OpenAIResponsesModel("policy")
agent = Agent(model, system_prompt="Do the task with the shell.")
agent.tool_plain(bash)
print(agent.run_sync(task).output)
