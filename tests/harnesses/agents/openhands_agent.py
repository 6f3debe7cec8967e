"""An agent of the OpenHands SDK with its own terminal and file editor: `openhands_agent.py TASK`; prints its answer."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool  # type: ignore[import-not-found]
from openhands.sdk.conversation.response_utils import get_agent_final_response  # type: ignore[import-not-found]
from openhands.tools.file_editor import FileEditorTool  # type: ignore[import-not-found]
from openhands.tools.terminal import TerminalTool  # type: ignore[import-not-found]

llm = LLM(
    usage_id="agent",
    model="openai/policy",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
print(get_agent_final_response(conversation.state.events))
conversation.close()
