"""Agents with tools on a rollout pool: the turns of each stay on one engine, and one engine is lost on the way.

    python examples/rollout_agent/agent.py                              # two stand-ins for vLLM, without a GPU
    python examples/rollout_agent/agent.py http://127.0.0.1:8000 ...    # your own, with a tool parser

A chat with `tools` goes to an engine as it is, because the tool parser is the engine's. The header `x-trimtab-session`
keeps the turns of an agent where its prefix is cached.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web

from trimtab.rollout import Gateway, GatewaySettings, RolloutPool

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


async def reply(request: web.Request) -> web.Response:
    """The stand-in's model: it calls the tool once, and then says what the tool said."""
    body = await request.json()
    *_, last = body["messages"]
    await asyncio.sleep(0.05)
    if last["role"] == "tool":
        message, finish = {"role": "assistant", "content": f"It is {last['content']}."}, "stop"
    else:
        function = {"name": "add", "arguments": json.dumps({"a": 20, "b": len(last["content"])})}
        calls = [{"id": "call-1", "type": "function", "function": function}]
        message, finish = {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return web.json_response({"choices": [choice], "usage": {"completion_tokens": 8}})


async def stand_in(stack: AsyncExitStack) -> tuple[str, web.AppRunner]:
    """A server with as much of vLLM's calls as a chat needs."""
    pages = {
        "/health": {},
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": [{"id": "stand-in"}]},
        "/is_sleeping": {"is_sleeping": False},
    }
    app = web.Application()
    for path, page in pages.items():
        app.router.add_get(path, lambda _, page=page: asyncio.sleep(0, web.json_response(page)))
    app.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}", runner


async def agent(http: aiohttp.ClientSession, url: str, number: int) -> list[str]:
    """One conversation; which engines had its turns."""
    messages = [{"role": "user", "content": f"How long is the name of agent {number}, and 20 more?"}]
    engines = []
    for _ in range(4):
        body = {"messages": messages, "tools": [ADD], "max_tokens": 200}
        headers = {"x-trimtab-session": f"agent-{number}"}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            engines.append(answer.headers["x-trimtab-workers"].split(",")[-1])
            message = (await answer.json())["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls") or ():
            given = json.loads(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(given["a"] + given["b"])})
        if not message.get("tool_calls"):
            messages.append({"role": "user", "content": "And once more?"})
    return engines


async def main(urls: list[str]) -> None:
    async with AsyncExitStack() as stack:
        runners = []
        if not urls:
            started = [await stand_in(stack) for _ in range(2)]
            urls, runners = [url for url, _ in started], [runner for _, runner in started]
        pool = await stack.enter_async_context(RolloutPool())
        for url in urls:
            await pool.attach(url)
        gateway = await stack.enter_async_context(Gateway(pool, GatewaySettings(token=secrets.token_urlsafe())))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        running = [asyncio.create_task(agent(http, gateway.url, number)) for number in range(8)]
        if runners:
            await asyncio.sleep(0.12)
            await runners[0].cleanup()  # one engine is lost while they talk
        for number, engines in enumerate(await asyncio.gather(*running)):
            print(f"agent {number}: {' -> '.join(engines)}")
        print(f"{pool.counters['answered_stop']} turns answered, {pool.counters['restarted']} restarted")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
