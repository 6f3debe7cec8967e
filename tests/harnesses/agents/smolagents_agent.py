"""A tool-calling agent of smolagents: `smolagents_agent.py TASK`; prints its answer."""

import os
import sys

from shell import bash
from smolagents import OpenAIModel, ToolCallingAgent, tool  # type: ignore[import-not-found]

model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent([tool(bash)], model, max_steps=8).run(sys.argv[1]))
