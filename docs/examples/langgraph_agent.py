"""LangGraph: a graph with a model and a tool node."""

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from stock import held_out, score, stock, train  # noqa: F401

from minirllm import rollout


@rollout
async def solve(task, config):
    model = ChatOpenAI(model=config.model, base_url=config.base_url, api_key=config.api_key).bind_tools([stock])

    async def ask(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([stock]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    state = await graph.compile().ainvoke({"messages": [("user", task.instruction)]})
    return state["messages"][-1].content
