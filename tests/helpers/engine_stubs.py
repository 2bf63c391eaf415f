"""Small HTTP servers that behave as vLLM and SGLang were seen to, traps included, for tests without either.

They answer on a real port, keep books of what really happens to requests, and share no code with the adapters. The
model is a rule: the next id follows from the last one and from the version of the weights. A test may hang a fault on
the next requests (`cut`, `silent`, `error`, `nonsense`, `miscount`) or use what the real ones do by themselves: hang
while paused, die when memory is released under running requests, say 200 and `success: false`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

IDS = 100


def follows(last: int, version: str) -> int:
    """The model."""
    return (last * 7 + 3 + sum(map(ord, version))) % IDS


def written(ids: list[int]) -> str:
    return "".join(chr(ord("A") + one % 26) for one in ids)


class Generation:
    """One request within a stub."""

    def __init__(self, key: str, prompt: list[int], most: int) -> None:
        self.key, self.prompt, self.most = key, prompt, most
        self.ids: list[int] = []
        self.versions: list[str] = []
        self.aborted = False
        self.every: int | None = 1  # tokens of an event; None: one body at the end
        self.said = 0  # tokens that were sent
        self.body: dict[str, Any] = {}
        self.chat = False  # a conversation, answered whole
        self.lora = ""  # path of its adapter


class Stub:
    """What the two have in common: requests, a pause, a version, and death."""

    def __init__(self) -> None:
        self.step_s = 0.005
        self.running: dict[str, Generation] = {}
        self.asked: list[tuple[str, Any]] = []  # every call that reached it
        self.bodies: list[dict[str, Any]] = []  # of requests to generate
        self.left = 0  # clients that went away
        self.made = 0  # tokens
        self.hung = 0  # requests that arrived while it was paused
        self.paused = asyncio.Event()
        self.goes = asyncio.Event()
        self.goes.set()
        self.mode = ""
        self.released: set[str] = set()
        self.loaded = "default"  # the version of the weights in memory
        self.fault = ""  # for requests that arrive from now on
        self.adapters: dict[str, str] = {}  # by name: its path
        self.lora = True  # it was started so that it takes adapters
        self.experts = True  # and says which experts made a token
        self.refuse: dict[str, tuple[int, Any]] = {}  # path: what it answers instead
        self.elsewhere: dict[str, Any] = {}  # path: another handler
        self.dead = False
        self.url = ""
        self._runner: web.AppRunner | None = None

    # As a server.

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Any]:
        app = web.Application(middlewares=[self._door])
        self.routes(app.router)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await self._runner.cleanup()

    def die(self) -> None:
        """As a process does: every connection breaks."""
        self.dead = True
        assert self._runner is not None
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            connection.force_close()

    def routes(self, router: web.UrlDispatcher) -> None:
        raise NotImplementedError

    @web.middleware
    async def _door(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method != "OPTIONS":  # only asks whether there is such a call
            self.asked.append((request.path, dict(request.query)))
        if self.dead:
            assert request.transport is not None
            request.transport.close()
        if request.path in self.refuse:
            status, body = self.refuse[request.path]
            return web.json_response(body, status=status)
        answered: web.StreamResponse = await self.elsewhere.get(request.path, handler)(request)
        return answered

    def calls(self, *paths: str) -> list[str]:
        return [path for path, _ in self.asked if not paths or path in paths]

    # Requests.

    async def stream(self, request: web.Request, one: Generation) -> web.StreamResponse:
        fault, self.fault = self.fault, ""
        if fault == "error":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        if fault == "refuse":
            return web.json_response({"error": {"message": "too many tokens"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if one.every is not None:
            await response.prepare(request)
        try:
            if not self.goes.is_set():
                self.hung += 1
                await self.goes.wait()
            self.running[one.key] = one
            while len(one.ids) < one.most and not one.aborted:
                await asyncio.sleep(self.step_s)
                if not self.goes.is_set():
                    if self.mode == "abort":
                        one.aborted = True
                        break
                    await self.goes.wait()
                one.ids.append(follows((one.prompt + one.ids)[-1], self.loaded + one.lora))
                one.versions.append(self.version)
                self.made += 1
                if len(one.ids) == 3 and fault in ("cut", "silent", "nonsense", "failure", "late refusal"):
                    if one.every is None and fault not in ("cut", "silent"):
                        return self._whole_fault(fault)
                    await self._hurt(request, response, fault)
                last = len(one.ids) == one.most
                if one.every is not None and (last or len(one.ids) - one.said >= one.every or len(one.ids) == 1):
                    await self._say(response, self.event(one, "length" if last else None, fault))
                    one.said = len(one.ids)
            if one.every is None:
                said = self.chat_reply if one.chat else self.event
                return web.json_response(said(one, "abort" if one.aborted else "length", fault))
            if one.aborted:
                await self._say(response, self.event(one, "abort", fault))
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        finally:
            self.running.pop(one.key, None)
        return response

    def _whole_fault(self, fault: str) -> web.Response:
        if fault == "nonsense":
            return web.Response(body=b"{this is no JSON}")
        refused = fault == "late refusal"
        return web.json_response({"error": {"message": "no such grammar"}}, status=400 if refused else 500)

    async def _hurt(self, request: web.Request, response: web.StreamResponse, fault: str) -> None:
        if fault == "cut":
            assert request.transport is not None
            request.transport.close()
        elif fault == "silent":
            await asyncio.sleep(600)
        elif fault == "failure":
            await self._say(response, {"error": {"message": "the scheduler died"}})
        elif fault == "late refusal":
            await self._say(response, {"error": {"message": "no such grammar", "code": 400}})
        else:
            await response.write(b"data: {this is no JSON}\n\n")

    async def _say(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def event(self, one: Generation, finish: str | None, fault: str) -> dict[str, Any]:
        raise NotImplementedError

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """A conversation with tools or images, which it answers by calling the first tool."""
        body = await request.json()
        self.bodies.append(body)
        assert not body.get("stream")
        if any("role" not in message for message in body["messages"]):
            return web.json_response({"error": {"message": "a message has no role"}}, status=400)
        if not self.knows(body):
            return self.unknown(body)
        one = Generation(f"chat-{len(self.asked)}", [len(body["messages"])], body.get("max_tokens", 16))
        one.body, one.chat, one.every, one.lora = body, True, None, self.adapter_of(body)
        return await self.stream(request, one)

    def chat_reply(self, one: Generation, finish: str, fault: str) -> dict[str, Any]:
        tools, samples = one.body.get("tools"), one.body.get("n", 1)
        message: dict[str, Any] = {"role": "assistant", "content": written(one.ids), "refusal": None, "tool_calls": []}
        if tools:
            function = {"name": tools[0]["function"]["name"], "arguments": json.dumps({"said": written(one.ids)})}
            calls = [{"id": f"call-{at}", "type": "function", "function": function} for at in range(2)]
            message |= {"content": None, "tool_calls": calls}
        finish = finish if finish == "abort" else "tool_calls" if tools else "stop"
        choices = [
            {"index": at, "message": message, "logprobs": None, "finish_reason": finish} for at in range(samples)
        ]
        made, prompt = len(one.ids) * samples, one.prompt[0]
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        head = {"id": "chatcmpl-of-the-engine", "object": "chat.completion", "created": 1, "model": one.body["model"]}
        return {**head, "choices": choices, "usage": usage}

    def adapter_of(self, body: dict[str, Any]) -> str:
        """Path of the adapter that it names; empty if none."""
        raise NotImplementedError

    def knows(self, body: dict[str, Any]) -> bool:
        raise NotImplementedError

    def unknown(self, body: dict[str, Any]) -> web.Response:
        """How it refuses an adapter that it does not know."""
        raise NotImplementedError

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        wrong = "" if self.lora else "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        if body["lora_name"] in self.adapters:
            wrong = f"the adapter {body['lora_name']} has already been loaded"
        if wrong:
            return web.json_response({"success": False, "error_message": wrong}, status=400)
        if body["lora_path"] == "nowhere":
            return self.no_adapter(body["lora_path"])
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.json_response({"success": True})

    def no_adapter(self, path: str) -> web.Response:
        return web.json_response({"success": False, "error_message": f"nothing at {path}"}, status=400)

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.json_response({"success": True})

    def cards(self) -> list[dict[str, Any]]:
        return [{"id": name, "root": path, "parent": "tiny"} for name, path in self.adapters.items()]

    def abort(self, keys: list[str] | None) -> None:
        for key, one in self.running.items():
            if keys is None or key in keys:
                one.aborted = True

    def stop(self, mode: str) -> None:
        self.mode = mode
        self.goes.clear()

    def go(self) -> None:
        self.goes.set()


class VllmStub(Stub):
    """vLLM 0.32 in development mode."""

    def __init__(self) -> None:
        super().__init__()
        self.version = "default"  # as it reports, whatever is loaded
        self.asleep = False
        self.release = "0.32.0"
        self.context: int | None = None  # tokens of prompt and answer together
        self.development = True

    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/health", self._health)
        router.add_get("/version", self._say_version)
        router.add_get("/v1/models", self._models)
        router.add_post("/v1/completions", self._completions)
        router.add_get("/metrics", self._metrics)
        self.more_routes(router)
        if self.development:
            router.add_get("/load", self._load)
            router.add_get("/is_paused", self._is_paused)
            router.add_get("/is_sleeping", self._is_sleeping)
            router.add_get("/weight_info", self._weight_info)
            router.add_get("/get_world_size", self._world_size)
            for path, handler in (
                ("/pause", self._pause), ("/resume", self._resume), ("/sleep", self._sleep), ("/wake_up", self._wake),
                ("/abort_requests", self._abort), ("/reset_prefix_cache", self._reset),
                ("/collective_rpc", self._rpc), ("/update_weight_version", self._set_version),
            ):  # fmt: skip
                router.add_post(path, handler)

    def more_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self._chat)
        if self.lora:
            router.add_post("/v1/load_lora_adapter", self._load_adapter)
            router.add_post("/v1/unload_lora_adapter", self._unload_adapter)

    def adapter_of(self, body: dict[str, Any]) -> str:
        return self.adapters.get(body["model"], "")

    def knows(self, body: dict[str, Any]) -> bool:
        return body["model"] == "tiny" or body["model"] in self.adapters

    def unknown(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": f"The model `{body['model']}` does not exist."}}, status=404)

    def no_adapter(self, path: str) -> web.Response:
        return web.json_response({"error": {"message": f"No adapter found for {path}"}}, status=404)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()  # whatever happens

    async def _say_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.release})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": self.context}, *self.cards()]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["return_token_ids"]
        self.body = body
        self.bodies.append(body)
        if not self.knows(body):
            return self.unknown(body)
        one = Generation(f"cmpl-{body['request_id']}-0", body["prompt"], body["max_tokens"])
        one.body, one.lora = body, self.adapter_of(body)
        one.every = body.get("stream_interval", 1) if body.get("stream") else None
        return await self.stream(request, one)

    def event(self, one: Generation, finish: str | None, fault: str) -> dict[str, Any]:
        new = one.ids[one.said :]
        count = len(one.ids) + (fault == "miscount" and len(one.ids) > 2)
        choice = {"text": written(new), "token_ids": new, "finish_reason": finish, "stop_reason": None}
        if self.experts and one.every is None:  # of every answer, but of no stream
            choice["routed_experts"] = f"experts of {len(one.prompt) + len(one.ids) - 1}"
        if self.body.get("logprobs") is not None:
            best = [{f"token_id:{token}": -0.5, "token_id:1": -1.5} for token in new]
            choice["logprobs"] = {"token_logprobs": [-0.5] * len(new), "top_logprobs": best}
        return {"choices": [choice], "usage": {"completion_tokens": count}}

    async def _metrics(self, request: web.Request) -> web.Response:
        # Those that hang are in neither figure.
        lines = [
            "# HELP vllm:num_requests_running x",
            f'vllm:num_requests_running{{engine="0"}} {len(self.running)}.0',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
            f'vllm:generation_tokens_total{{engine="0"}} {self.made}.0',
        ]
        return web.Response(text="\n".join(lines))

    async def _load(self, request: web.Request) -> web.Response:
        waiting = self.hung if not self.goes.is_set() else 0
        return web.json_response({"server_load": len(self.running) + waiting})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.goes.is_set()})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.asleep})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode == "wait":
            while self.running:
                await asyncio.sleep(0.01)
        self.stop(mode)
        while mode == "abort" and self.running:
            await asyncio.sleep(0.01)
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.go()
        return web.json_response({"status": "resumed"})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.abort(None)
        self.stop("abort")
        self.asleep = True
        self.released = {"weights", "kv_cache"}
        if request.query["level"] == "2":
            self.loaded = "nothing"
        return web.Response()

    async def _wake(self, request: web.Request) -> web.Response:
        self.released -= set(request.query.getall("tags", ["weights", "kv_cache"]))
        self.asleep = bool(self.released)
        if not self.asleep:
            self.go()
        return web.json_response({"status": "sleeping" if self.asleep else "awake"})

    async def _abort(self, request: web.Request) -> web.Response:
        keys = (await request.json()).get("request_ids")
        self.abort(keys or None)  # an empty list is everybody's
        return web.json_response({"status": "aborted", "aborted": len(keys or ())})  # also those that it never had

    async def _reset(self, request: web.Request) -> web.Response:
        free = not self.running or request.query.get("reset_running_requests") == "true"
        return web.json_response({"success": free})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        assert "weights" not in self.released
        self.loaded = body["kwargs"]["weights_path"]
        return web.json_response({"results": [None]})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.version})


class SglangStub(Stub):
    """SGLang 0.5.23."""

    def __init__(self) -> None:
        super().__init__()
        self.takes_interval = True
        self.version = "default"
        self.release = "0.5.23"
        self.running_limit: int | None = None  # as its scheduler has it
        self.only_new = False  # ids of an event: only the new ones
        self.stamp: float | None = None  # its loads stand still at this time
        self.counts_late = False  # its loads are those of a prefill: what was begun is not among the running ones
        self.counted = 0

    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/health", self._health)
        router.add_get("/ready", self._ready)
        router.add_get("/server_info", self._server_info)
        router.add_get("/model_info", self._model_info)
        router.add_get("/v1/loads", self._loads)
        self.more_routes(router)
        for path, handler in (
            ("/generate", self._generate), ("/pause_generation", self._pause), ("/continue_generation", self._continue),
            ("/abort_request", self._abort), ("/flush_cache", self._flush),
            ("/release_memory_occupation", self._release), ("/resume_memory_occupation", self._take),
            ("/update_weights_from_disk", self._update),
        ):  # fmt: skip
            router.add_post(path, handler)

    def more_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/models", self._models)
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/load_lora_adapter", self._load_adapter)
        router.add_post("/unload_lora_adapter", self._unload_adapter)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "root": "tiny"}, *self.cards()]})

    def adapter_of(self, body: dict[str, Any]) -> str:
        return self.adapters.get(body.get("lora_path", ""), "")

    def knows(self, body: dict[str, Any]) -> bool:
        return body.get("lora_path") is None or body["lora_path"] in self.adapters

    def unknown(self, body: dict[str, Any]) -> web.Response:
        wrong = f"Got LoRA adapter that has never been loaded: {body['lora_path']}"
        return web.json_response({"error": {"message": wrong}}, status=400)

    async def _health(self, request: web.Request) -> web.Response:
        await self.goes.wait()
        await asyncio.sleep(1.0)
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.goes.is_set() else 503)

    async def _server_info(self, request: web.Request) -> web.Response:
        states = [] if self.running_limit is None else [{"effective_max_running_requests_per_dp": self.running_limit}]
        return web.json_response({"version": self.release, "internal_states": states})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _loads(self, request: web.Request) -> web.Response:
        if self.goes.is_set() and self.stamp is None:
            self.counted, self.fresh_at = len(self.running), time.time()
        held = sum(len(one.prompt) + len(one.ids) for one in self.running.values())
        count = 0 if self.counts_late else self.counted
        core = {"num_running_reqs": count, "num_waiting_reqs": 0, "num_used_tokens": held, "token_usage": 0.5}
        at = self.stamp if self.stamp is not None else self.fresh_at
        return web.json_response({"loads": [core | {"timestamp": at}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = self.body = await request.json()
        self.bodies.append(body)
        if not self.knows(body):
            return self.unknown(body)
        sampling = body["sampling_params"]
        assert "return_routed_experts" not in sampling, "it is no sampling parameter"
        one = Generation(body.get("rid", "own"), body.get("input_ids", [1]), sampling["max_new_tokens"])
        one.body, one.lora = body, self.adapter_of(body)
        if "stream_interval" in sampling and not self.takes_interval:
            message = "SamplingParams.__init__() got an unexpected keyword argument 'stream_interval'"
            return web.json_response({"error": {"message": message}}, status=400)
        one.every = sampling.get("stream_interval", 1) if body.get("stream") else None
        try:
            return await self.stream(request, one)
        finally:  # once more, whatever has that name by then
            asyncio.get_running_loop().call_later(0.3, self.abort, [one.key])

    def event(self, one: Generation, finish: str | None, fault: str) -> dict[str, Any]:
        new = one.ids[one.said :]
        spans: list[dict[str, Any]] = []
        for place, version in enumerate(one.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": place})
            spans[-1]["end"] = place + 1
        meta: dict[str, Any] = {
            "id": one.key,
            "completion_tokens": len(one.ids) + (fault == "miscount" and len(one.ids) > 2),
            "finish_reason": {"type": finish, "matched": None} if finish else None,
            "weight_version": self.version,
            "weight_versions": spans,
        }
        if self.experts and one.body.get("return_routed_experts"):  # so far
            meta["routed_experts"] = f"experts of {len(one.prompt) + len(one.ids) - 1}"
        if self.body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in one.ids]
            meta["output_top_logprobs"] = [[[-0.5, token, None], [-1.5, 1, None]] for token in one.ids]
        ids = new if self.only_new else one.ids
        return {"text": written(ids), "output_ids": ids, "meta_info": meta}

    async def _pause(self, request: web.Request) -> web.Response:
        self.counted = len(self.running)
        self.fresh_at = time.time()
        self.stop((await request.json())["mode"])
        while self.mode == "abort" and self.running:
            await asyncio.sleep(0.01)
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self.go()
        return web.json_response({"status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.abort(None if body.get("abort_all") else [body["rid"]])
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        if self.running and self.mode != "retract":
            return web.Response(status=400, text="there are running requests")
        return web.Response(text="Cache flushed.")

    async def _release(self, request: web.Request) -> web.Response:
        if self.running and (self.goes.is_set() or self.mode not in ("retract",)):
            self.die()  # the scheduler's assertion
            return web.Response(status=500)
        self.released |= set((await request.json())["tags"])
        if "weights" in self.released:
            self.loaded = "nothing"
        return web.json_response(None)

    async def _take(self, request: web.Request) -> web.Response:
        self.released -= set((await request.json())["tags"])
        return web.json_response(None)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert "weights" not in self.released
        if body["model_path"] == "nowhere":
            return web.json_response({"success": False, "message": "no such folder"})
        self.loaded, self.version = body["model_path"], body["weight_version"]
        return web.json_response({"success": True, "message": "ok"})
