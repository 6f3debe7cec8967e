"""An agent of the OpenAI Agents SDK: `openai_agents.py chat|responses whole|stream TASK`; prints its answer."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api  # type: ignore[import-not-found]
from shell import bash


async def main(dialect: str, way: str, task: str) -> None:
    set_default_openai_api("chat_completions" if dialect == "chat" else "responses")
    agent = Agent(name="shell", model="policy", instructions="Do the task with the shell.", tools=[function_tool(bash)])
    if way == "stream":
        result = Runner.run_streamed(agent, task)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, task)
    print(result.final_output)


asyncio.run(main(*sys.argv[1:]))
