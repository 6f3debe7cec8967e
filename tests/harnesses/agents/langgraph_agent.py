"""An agent of LangGraph: `langgraph_agent.py chat|responses whole|stream TASK`; prints its answer."""

import sys

from langchain.agents import create_agent  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from shell import bash

dialect, way, task = sys.argv[1:]
model = ChatOpenAI(model="policy", use_responses_api=dialect == "responses", streaming=way == "stream")
agent = create_agent(model, [bash])
state = agent.invoke({"messages": [{"role": "user", "content": task}]})
content = state["messages"][-1].content
print(content if isinstance(content, str) else "".join(part.get("text", "") for part in content))
