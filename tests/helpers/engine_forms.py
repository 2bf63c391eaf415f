"""Servers of older releases: one for each form of each call, made from what the public code of that release does.

A form has the calls of its release and nothing else (other paths are 404), ignores fields that its release ignores, and
says so on its OpenAPI page, unless a test hides that.
"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from engine_stubs import Generation, SglangStub, VllmStub

VLLM: dict[str, dict[str, Any]] = {
    # calls that came with a release, and what changed in them
    "0.10.0": {"without": ("/collective_rpc",), "pause": None, "abort": None, "version": False, "reload": "no"},
    "0.10.2": {"pause": None, "abort": None, "version": False, "reload": "configured"},
    "0.11.1": {"pause": None, "abort": "tokens-only", "version": False, "reload": "configured"},
    "0.12.0": {"pause": "flag", "abort": None, "version": False, "reload": "configured"},
    "0.16.0": {"pause": "mode", "abort": None, "version": False, "reload": "path", "transfer": True},
    "0.26.0": {
        "pause": "mode", "abort": "tokens-only", "version": False, "reload": "path", "transfer": True,
        "completions": ("cache_salt",),
    },
    "0.27.0": {
        "pause": "mode", "abort": None, "version": True, "reload": "path", "transfer": True,
        "completions": ("cache_salt", "stream_interval"),
    },
    "0.32.0": {
        "pause": "mode", "abort": "dev", "version": True, "reload": "path", "transfer": True,
        "completions": ("cache_salt", "stream_interval"),
    },
}  # fmt: skip
SGLANG: dict[str, dict[str, Any]] = {
    "0.4.6": {"pause": None, "abort": None, "version": False, "tags": False, "loads": None},
    "0.4.8": {"pause": None, "abort": "prefix", "version": False, "tags": False, "loads": "tokens"},
    "0.4.9": {"pause": "abort", "abort": "prefix", "version": False, "tags": True, "loads": "tokens"},
    "0.5.2": {"pause": "abort", "abort": "prefix", "version": True, "tags": True, "loads": "tokens"},
    "0.5.4": {"pause": "abort", "abort": "prefix", "version": True, "tags": True, "loads": "requests"},
    "0.5.6": {"pause": "mode", "abort": "exact", "version": True, "tags": True, "loads": "requests"},
    "0.5.23": {"pause": "mode", "abort": "exact", "version": True, "tags": True, "loads": "v1"},
}


def schema(fields: dict[str, tuple[str, ...]], bodies: dict[str, tuple[str, ...]], paths: list[str]) -> dict[str, Any]:
    """An OpenAPI page: query parameters, and bodies by reference."""
    page: dict[str, Any] = {}
    for path in paths:
        call: dict[str, Any] = {"parameters": [{"name": name, "in": "query"} for name in fields.get(path, ())]}
        if path in bodies:
            call["requestBody"] = {
                "content": {
                    "application/json": {"schema": {"$ref": f"#/components/schemas/{path[1:].replace('/', '_')}"}}
                }
            }
        page[path] = {"post": call}
    parts: dict[str, Any] = {
        path[1:].replace("/", "_"): {"properties": {name: {} for name in names}} for path, names in bodies.items()
    }
    return {"openapi": "3.1.0", "paths": page, "components": {"schemas": parts}}


async def crashed(request: web.Request) -> web.Response:
    """A handler of uvicorn that raised: it answers, and then closes the connection without having said so."""
    response = web.Response(status=500, text="Internal Server Error")
    await response.prepare(request)
    await response.write_eof()
    assert request.transport is not None
    request.transport.close()
    return response


class VllmForm(VllmStub):
    """vLLM of one release, in development mode."""

    def __init__(self, release: str, *, openapi: bool = True, started: float | None = None, shows: bool = True) -> None:
        super().__init__()
        self.release, self.form, self.openapi = release, VLLM[release], openapi
        self.started = time.time() if started is None else started
        self.shows = shows  # its metrics have the start time; not so with several API servers
        self.root = "default"
        self.interval: int | None = None  # `--stream-interval`; None: this release does not say
        self.paths: list[str] = []

    def restart(self) -> None:
        """Another process at the same address, with the weights that it is started with."""
        self.started += 60.0
        self.adapters.clear()
        self.loaded, self.version, self.root_now = self.root, "default", self.root
        self.asleep, self.released = False, set()
        self.go()

    def routes(self, router: web.UrlDispatcher) -> None:
        form = self.form
        self.root_now = self.root
        for path, handler in (
            ("/health", self._health), ("/version", self._say_version), ("/v1/models", self._models),
            ("/metrics", self._metrics), ("/load", self._load), ("/is_sleeping", self._is_sleeping),
            ("/server_info", self._server_info),
        ):  # fmt: skip
            router.add_get(path, handler)
        router.add_post("/v1/completions", self._completions)
        self.more_routes(router)
        posts: dict[str, Any] = {
            "/sleep": self._sleep, "/wake_up": self._wake, "/reset_prefix_cache": self._reset_of_form,
            "/collective_rpc": self._rpc_of_form,
        }  # fmt: skip
        if form["pause"]:
            router.add_get("/is_paused", self._is_paused)
            posts |= {"/pause": self._pause_of_form, "/resume": self._resume}
        if form["abort"]:
            posts["/abort_requests"] = self._abort_of_form
        if form["version"]:
            router.add_get("/weight_info", self._weight_info)
            posts["/update_weight_version"] = self._set_version
        if form.get("transfer"):
            router.add_get("/get_world_size", self._world)
            posts |= {"/init_weight_transfer_engine": self._not_configured, "/update_weights": self._not_configured}
        for path in form.get("without", ()):
            posts.pop(path)
        for path, handler in posts.items():
            router.add_post(path, handler)
        self.paths = [*posts, "/is_sleeping", "/server_info", *(["/get_world_size"] if form.get("transfer") else [])]
        self.paths += ["/weight_info"] if form["version"] else []
        self.paths += ["/v1/load_lora_adapter"] if self.lora else []
        if self.openapi:
            router.add_get("/openapi.json", self._page)

    async def _server_info(self, request: web.Request) -> web.Response:
        settings = {} if self.interval is None else {"stream_interval": self.interval}
        whole = {"scheduler_config": settings}
        return web.json_response({"vllm_config": whole if request.query.get("config_format") == "json" else str(whole)})

    async def _page(self, request: web.Request) -> web.Response:
        flag = ("wait_for_inflight_requests", "clear_cache")
        return web.json_response(
            schema(
                {"/pause": ("mode", *flag) if self.form["pause"] == "mode" else flag},
                {"/v1/completions": self.form.get("completions", ())},
                ["/v1/completions", *self.paths],
            )
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "root": self.root}, *self.cards()]})

    async def _metrics(self, request: web.Request) -> web.Response:
        page = (await super()._metrics(request)).text or ""
        return web.Response(text=f"{page}\nprocess_start_time_seconds {self.started}" if self.shows else page)

    async def _world(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _not_configured(self, request: web.Request) -> web.Response:
        return await crashed(request)

    async def _pause_of_form(self, request: web.Request) -> web.Response:
        if self.form["pause"] == "mode":
            return await self._pause(request)
        waits = request.query.get("wait_for_inflight_requests") == "true"
        return await self._pause(request.clone(rel_url=f"/pause?mode={'wait' if waits else 'abort'}"))

    async def _abort_of_form(self, request: web.Request) -> web.Response:
        if self.form["abort"] == "dev":
            return await self._abort(request)
        keys = (await request.json()).get("request_ids")
        if keys is None:
            return web.json_response({"detail": "Missing 'request_ids' in request body"}, status=400)
        self.abort(keys)
        return web.Response()

    async def _reset_of_form(self, request: web.Request) -> web.Response:
        reply = await self._reset(request)
        return reply if tuple(map(int, self.release.split("."))) >= (0, 26, 0) else web.Response()

    async def _rpc_of_form(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = body.get("kwargs") or {}
        assert "weights" not in self.released
        if body["method"] == "update_config":
            self.root_now = given["overrides"]["model_config"]["model"]
        elif self.form["reload"] == "configured" and given:
            return await crashed(request)  # an unexpected keyword argument
        else:
            path = given.get("weights_path", self.root_now)
            if path == "nowhere":
                self.loaded = "half of nothing"
                return await crashed(request)
            self.loaded = path
        return web.json_response({"results": [None]})


class SglangForm(SglangStub):
    """SGLang of one release."""

    def __init__(self, release: str, *, openapi: bool = True) -> None:
        super().__init__()
        self.release, self.form, self.openapi = release, SGLANG[release], openapi
        self.takes_interval = self.form["pause"] is not None
        self.root = self.model_path = "default"
        self.paths: list[str] = []

    def restart(self) -> None:
        """Another process at the same address, with the weights that it is started with."""
        self.adapters.clear()
        self.loaded, self.version, self.model_path = self.root, "default", self.root
        self.released = set()
        self.go()

    def routes(self, router: web.UrlDispatcher) -> None:
        form, new = self.form, self.form["pause"] == "mode"
        router.add_get("/health", self._health)
        router.add_get("/server_info" if new else "/get_server_info", self._server_info)
        router.add_get("/model_info" if new else "/get_model_info", self._info_of_form)
        posts: dict[str, Any] = {
            "/flush_cache": self._flush, "/release_memory_occupation": self._release_of_form,
            "/resume_memory_occupation": self._take_of_form, "/update_weights_from_disk": self._update_of_form,
            "/init_weights_update_group": self._ok, "/update_weights_from_distributed": self._ok,
            "/update_weights_from_tensor": self._ok,
        }  # fmt: skip
        if form["pause"]:
            posts |= {"/pause_generation": self._pause_of_form, "/continue_generation": self._continue}
        if form["abort"]:
            posts["/abort_request"] = self._abort_of_form
        if form["version"]:
            posts["/update_weight_version"] = self._ok
        gets = {"v1": "/v1/loads", "tokens": "/get_load", "requests": "/get_load"}
        if form["loads"]:
            router.add_get(gets[form["loads"]], self._loads if form["loads"] == "v1" else self._get_load)
        if self.release == "0.5.23":
            router.add_get("/ready", self._ready)
        router.add_post("/generate", self._generate)
        self.more_routes(router)
        for path, handler in posts.items():
            router.add_post(path, handler)
        self.paths = [
            *posts,
            "/load_lora_adapter",
            *([gets[form["loads"]]] if form["loads"] else []),
            *(["/server_info"] if new else []),
        ]
        if self.openapi:
            router.add_get("/openapi.json", self._page)

    async def _page(self, request: web.Request) -> web.Response:
        bodies: dict[str, tuple[str, ...]] = {"/update_weights_from_disk": ("model_path", "load_format")}
        if self.form["pause"] == "mode":
            bodies["/pause_generation"] = ("mode",)
        if self.form["tags"]:
            bodies["/release_memory_occupation"] = ("tags",)
        return web.json_response(schema({}, bodies, self.paths))

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "ok"})

    async def _info_of_form(self, request: web.Request) -> web.Response:
        said = {"weight_version": self.version} if self.form["version"] else {}
        return web.json_response({"model_path": self.model_path, **said})

    async def _get_load(self, request: web.Request) -> web.Response:
        held = sum(len(one.prompt) + len(one.ids) for one in self.running.values())
        if self.form["loads"] == "tokens":
            return web.json_response({"load": held})
        rank = {"dp_rank": 0, "num_reqs": len(self.running), "num_waiting_reqs": 0, "num_tokens": held}
        return web.json_response([rank])

    async def _pause_of_form(self, request: web.Request) -> web.Response:
        if self.form["pause"] == "mode":
            return await self._pause(request)
        self.abort(None)  # whatever the body says
        self.stop("abort")
        return web.json_response({"status": "ok"})

    async def _abort_of_form(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.release == "0.4.8" and "rid" not in body:
            return web.json_response({"detail": "Field required"}, status=422)
        if body.get("abort_all"):
            self.abort(None)
        elif self.form["abort"] == "prefix":
            self.abort([key for key in self.running if key.startswith(body["rid"])])
        else:
            self.abort([body["rid"]])
        return web.Response()

    async def _release_of_form(self, request: web.Request) -> web.Response:
        if self.form["tags"]:
            return await self._release(request)
        self.released, self.loaded = {"weights", "kv_cache"}, "nothing"  # it knows no tags
        return web.json_response(None)

    async def _take_of_form(self, request: web.Request) -> web.Response:
        if self.form["tags"]:
            return await self._take(request)
        self.released = set()
        return web.json_response(None)

    async def _update_of_form(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert "weights" not in self.released
        if body["model_path"] == "nowhere":
            return web.json_response({"success": False, "message": "no such folder"}, status=400)
        self.loaded = self.model_path = body["model_path"]
        if self.form["version"]:
            self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "ok", "num_paused_requests": 0})

    def event(self, one: Generation, finish: str | None, fault: str) -> dict[str, Any]:
        said = super().event(one, finish, fault)
        if not self.form["version"]:
            del said["meta_info"]["weight_version"], said["meta_info"]["weight_versions"]
        return said
