"""An agent of AutoGen: `autogen_agent.py shell|stream|calculator TASK`; prints its answer.

`calculator` takes its tool from the MCP server mcp-server-calculator and reflects on what the tool says.
"""

import asyncio
import os
import sys
from pathlib import Path

from autogen_agentchat.agents import AssistantAgent  # type: ignore[import-not-found]
from autogen_ext.models.openai import OpenAIChatCompletionClient  # type: ignore[import-not-found]
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams  # type: ignore[import-not-found]
from shell import bash

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def main(kind: str, task: str) -> None:
    client = OpenAIChatCompletionClient(
        model="policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        model_info=INFO,  # type: ignore[arg-type]
    )
    if kind == "calculator":
        program = str(Path(sys.executable).with_name("mcp-server-calculator"))
        server = StdioServerParams(command=program, read_timeout_seconds=60)
        async with McpWorkbench(server) as workbench:
            agent = AssistantAgent("calculator", client, workbench=workbench, reflect_on_tool_use=True)
            result = await agent.run(task=task)
    else:
        agent = AssistantAgent(
            "shell", client, tools=[bash], max_tool_iterations=10, model_client_stream=kind == "stream"
        )
        result = await agent.run(task=task)
    print(result.messages[-1].to_text())
    await client.close()


asyncio.run(main(*sys.argv[1:]))
