"""The gateway before real llama.cpp servers: what each dialect asks and gets, through a real port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_servers import LlamaServer, servers
from gateway_scenes import BEARER, PROMPT, TOKEN, Front, play
from tiny_gguf import pieces
from trimtab.core.errors import InputError
from trimtab.model.rollout import WorkerState
from trimtab.runtime.gateway.server import Gateway
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.rollout.pool import RolloutPool

WRITTEN = pieces()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LlamaServer]]:
    with servers(2, tmp_path_factory.mktemp("engines")) as started:
        yield started


@pytest.fixture
def urls(engines: list[LlamaServer]) -> list[str]:
    return [one.url for one in engines]


def text_of(ids: list[int]) -> str:
    return b"".join(WRITTEN[one] for one in ids).decode()


# ---- OpenAI's completions ------------------------------------------------------------------------------------------


def test_a_completion_has_text_ids_usage_and_a_finish(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        got = await front.complete(tokens=8, return_token_ids=True)
        assert got.status == 200, got.text
        [choice] = got.json["choices"]
        assert choice["text"] == text_of(choice["token_ids"])
        assert (choice["finish_reason"], choice["prompt_token_ids"], choice["logprobs"]) == ("length", PROMPT, None)
        assert got.json["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}
        assert got.json["object"] == "text_completion"
        assert got.json["id"] == f"cmpl-{got.headers['x-trimtab-id']}"
        assert got.headers["x-trimtab-versions"] == "0:8"
        assert got.headers["x-trimtab-moves"] == "0"
        assert got.headers["x-trimtab-workers"] in [url.removeprefix("http://") for url in urls]
        assert "trimtab" not in choice
        assert "token_ids" not in (await front.complete()).json["choices"][0]

    play(urls, act)


def test_text_ids_and_lists_of_them_are_prompts_alike(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        alone = (await front.complete("dada hello", return_token_ids=True)).json["choices"][0]
        ids = alone["prompt_token_ids"]
        assert text_of(ids) == "dada hello"
        for prompt in (ids, ["dada hello"], [ids]):
            assert (await front.complete(prompt)).json["choices"][0]["text"] == alone["text"]
        both = (await front.complete([ids, PROMPT], return_token_ids=True)).json["choices"]
        assert [one["index"] for one in both] == [0, 1]
        assert both[0]["text"] == alone["text"]
        assert both[1]["prompt_token_ids"] == PROMPT

    play(urls, act)


def test_ids_that_the_model_does_not_know_are_refused_before_an_engine_sees_them(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        for prompt in ([5, 157], [[5], [5, 10**6]]):
            got = await front.complete(prompt)
            assert (got.status, got.json["error"]["param"], got.json["error"]["code"]) == (
                400,
                "prompt",
                "invalid_value",
            )
            assert "vocabulary of 157 token ids" in got.message
        assert (await front.generate(input_ids=[5, 156])).status == 200
        assert (await front.generate(input_ids=[5, 157])).json["error"]["param"] == "input_ids"
        assert sum(view.served for view in front.pool.workers()) == 1

    play(urls, act)


def test_several_samples_of_several_prompts_are_numbered_through(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        body = {"prompt": [PROMPT, [9, 10]], "n": 3, "max_tokens": 4, "temperature": 1.0}
        got = (await front.post("/v1/completions", body)).json
        assert [one["index"] for one in got["choices"]] == list(range(6))
        assert got["usage"]["completion_tokens"] <= 24
        streamed = await front.post("/v1/completions", {**body, "stream": True})
        assert streamed.events[-1] == "[DONE]"
        assert [sum(one["finish_reason"] is not None for one in streamed.choices(n)) for n in range(6)] == [1] * 6

    play(urls, act)


def test_a_stream_says_the_same_as_the_answer_in_one_piece_and_ends_with_done(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        whole = (await front.complete(tokens=20, return_token_ids=True)).json
        options = {"include_usage": True}
        got = await front.complete(tokens=20, stream=True, return_token_ids=True, stream_options=options)
        assert got.headers["content-type"].startswith("text/event-stream")
        assert got.events[-1] == "[DONE]"
        assert got.events[-2]["usage"] == whole["usage"]
        choices = got.choices()
        assert "".join(one["text"] for one in choices) == whole["choices"][0]["text"]
        assert [one for choice in choices for one in choice.get("token_ids", [])] == whole["choices"][0]["token_ids"]
        assert choices[0]["prompt_token_ids"] == PROMPT
        assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"]

    play(urls, act)


def test_log_probabilities_have_the_tokens_as_text_or_as_ids(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        got = (await front.complete(tokens=6, logprobs=2, return_token_ids=True)).json["choices"][0]
        told, ids = got["logprobs"], got["token_ids"]
        assert told["tokens"] == [WRITTEN[one].decode() for one in ids]
        assert told["text_offset"] == [len(text_of(ids[:place])) for place in range(6)]
        assert all(best[name] == value for best, name, value in zip(
            told["top_logprobs"], told["tokens"], told["token_logprobs"], strict=True))  # fmt: skip
        assert {len(best) for best in told["top_logprobs"]} == {2}
        by_id = (await front.complete(tokens=6, logprobs=0, return_tokens_as_token_ids=True)).json["choices"][0]
        assert by_id["logprobs"]["tokens"] == [f"token_id:{one}" for one in ids]
        assert by_id["logprobs"]["top_logprobs"] is None
        streamed = (await front.complete(tokens=6, logprobs=2, stream=True)).choices()
        assert [one for choice in streamed for one in choice["logprobs"]["tokens"]] == told["tokens"]
        assert [one for choice in streamed for one in choice["logprobs"]["text_offset"]] == told["text_offset"]

    play(urls, act)


def test_a_stop_string_ends_the_answer_and_is_not_in_its_text(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        text = (await front.complete(tokens=12)).json["choices"][0]["text"]
        stop = text[5:8]
        for more in ({"stop": stop}, {"stop": [stop, "never this"]}):
            choice = (await front.complete(tokens=12, **more)).json["choices"][0]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:5], "stop", stop)
        streamed = (await front.complete(tokens=12, stop=stop, stream=True)).choices()
        assert "".join(one["text"] for one in streamed) == text[:5]

    play(urls, act)


def test_a_seed_gives_the_same_answer_again_and_its_samples_differ(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "seed": 7, "n": 2}
        first, second = [(await front.post("/v1/completions", body)).json["choices"] for _ in range(2)]
        assert [one["text"] for one in first] == [one["text"] for one in second]
        assert first[0]["text"] != first[1]["text"]

    play(urls, act)


def test_what_changes_nothing_is_taken_and_what_only_engines_know_is_passed_on(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        plain = (await front.complete()).json["choices"][0]["text"]
        nothing = {"user": "somebody", "presence_penalty": 0, "best_of": 1, "echo": False, "suffix": None, "top_k": -1}
        assert (await front.complete(**nothing)).json["choices"][0]["text"] == plain
        first = (await front.complete(tokens=1, return_token_ids=True)).json["choices"][0]["token_ids"][0]
        banned = await front.complete(logit_bias={str(first): -100})
        assert banned.status == 200, banned.text
        assert banned.json["choices"][0]["text"] != plain

    play(urls, act)


# ---- chat ----------------------------------------------------------------------------------------------------------


def test_a_chat_is_rendered_by_the_models_own_template(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
        got = (await front.post("/v1/chat/completions", {**body, "return_token_ids": True})).json
        assert text_of(got["prompt_token_ids"]).startswith("<|im_start|>user\nhi")
        [choice] = got["choices"]
        assert choice["message"] == {"role": "assistant", "content": text_of(choice["token_ids"])}
        assert got["object"] == "chat.completion"
        streamed = await front.post("/v1/chat/completions", {**body, "stream": True})
        deltas = [one["delta"] for one in streamed.choices()]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(one.get("content", "") for one in deltas) == choice["message"]["content"]
        assert streamed.events[0]["object"] == "chat.completion.chunk"
        assert streamed.events[-1] == "[DONE]"

    play(urls, act)


def test_a_chat_tells_log_probabilities_in_its_own_form(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3, "temperature": 0}
        got = await front.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2})
        places = got.json["choices"][0]["logprobs"]["content"]
        assert "".join(one["token"] for one in places) == got.json["choices"][0]["message"]["content"]
        assert [one["top_logprobs"][0]["logprob"] for one in places] == [one["logprob"] for one in places]
        assert {len(one["top_logprobs"]) for one in places} == {2}
        assert bytes(places[0]["bytes"]).decode() == places[0]["token"]

    play(urls, act)


# ---- SGLang's generate ---------------------------------------------------------------------------------------------


def test_generate_answers_with_meta_info_as_sglang_does(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        reference = (await front.complete(tokens=6, return_token_ids=True)).json["choices"][0]
        got = (await front.generate(6, rid="mine", return_logprob=True, top_logprobs_num=2)).json
        assert (got["text"], got["output_ids"]) == (reference["text"], reference["token_ids"])
        meta = got["meta_info"]
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (4, 6, "0")
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
        assert [one[1] for one in meta["output_token_logprobs"]] == got["output_ids"]
        assert all(isinstance(one[0], float) and one[2] is None for one in meta["output_token_logprobs"])
        assert [places[0] for places in meta["output_top_logprobs"]] == meta["output_token_logprobs"]

    play(urls, act)


def test_generate_takes_batches_with_parameters_for_each(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        sampling = [{"max_new_tokens": 2, "temperature": 0}, {"max_new_tokens": 5, "temperature": 0}]
        body = {"text": ["dada", "hello"], "sampling_params": sampling, "rid": ["a", "b"]}
        got = (await front.post("/generate", body)).json
        assert [(one["meta_info"]["id"], len(one["output_ids"])) for one in got] == [("a", 2), ("b", 5)]
        several = (await front.generate(2, sampling={"n": 3})).json
        assert [one["meta_info"]["completion_tokens"] for one in several] == [2, 2, 2]

    play(urls, act)


def test_generate_streams_the_whole_answer_so_far(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        whole = (await front.generate(12, return_logprob=True)).json
        got = await front.generate(12, stream=True, return_logprob=True)
        assert got.events[-1] == "[DONE]"
        events = got.events[:-1]
        lengths = [len(one["output_ids"]) for one in events]
        assert lengths == sorted(lengths)
        assert all(whole["text"].startswith(one["text"]) for one in events)
        assert [one["meta_info"]["finish_reason"] for one in events[:-1]] == [None] * (len(events) - 1)
        last = events[-1]
        assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        told = [one[1] for one in last["meta_info"]["output_token_logprobs"]]
        assert told == last["output_ids"]
        plain = (await front.generate(12, stream=True, rid='with "quotes"')).events[:-1]
        assert {one["meta_info"]["id"] for one in plain} == {'with "quotes"'}
        assert all(one["text"] == text_of(one["output_ids"]) for one in plain)
        assert all(one["meta_info"]["completion_tokens"] == len(one["output_ids"]) for one in plain)
        assert plain[-1]["output_ids"] == whole["output_ids"]
        pair = (await front.generate(3, stream=True, sampling={"n": 2})).events[:-1]
        assert {one["index"] for one in pair} == {0, 1}

    play(urls, act)


def test_generate_says_what_stopped_it(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        whole = (await front.generate(12)).json
        stop = whole["text"][4:6]
        got = (await front.generate(12, sampling={"stop": stop})).json
        assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        last = whole["output_ids"][5]
        got = (await front.generate(12, sampling={"stop_token_ids": [last]})).json
        assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": last}
        assert got["output_ids"] == whole["output_ids"][: whole["output_ids"].index(last) + 1]

    play(urls, act)


# ---- trimtab's own terms -------------------------------------------------------------------------------------------


def test_headers_choose_class_group_key_and_details(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        heads = {"x-trimtab-details": "1", "x-trimtab-group": "g", "x-trimtab-deadline-s": "30", "idempotency-key": "k"}
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0}
        first, second = [await front.post("/v1/completions", body, headers=heads) for _ in range(2)]
        told = first.json["choices"][0]["trimtab"]
        assert told["versions"][0]["version"] == 0
        assert told["workers"] == [first.headers["x-trimtab-workers"]]
        assert told["reason"]["code"] == "COMPLETED"
        assert second.json["choices"][0]["text"] == first.json["choices"][0]["text"]
        assert second.json["choices"][0]["trimtab"]["request"] != told["request"]
        assert (await front.post("/v1/completions", body)).json["choices"][0]["text"] != first.json["choices"][0][
            "text"
        ]

    play(urls, act)


def test_a_version_that_is_gone_or_a_deadline_that_passes_is_an_error_with_its_reason(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        late = await front.complete(headers={"x-trimtab-at-least": "3", "x-trimtab-deadline-s": "0.05"})
        assert (late.status, late.json["error"]["code"]) == (504, "TOO_LATE")
        assert "version" in late.message
        streamed = await front.complete(stream=True, headers={"x-trimtab-version": "3", "x-trimtab-deadline-s": "0.05"})
        assert (streamed.status, streamed.json["error"]["code"]) == (504, "TOO_LATE")
        unknown = await front.complete(headers={"x-trimtab-class": "nobodys"})
        assert unknown.status == 400
        assert "nobodys" in unknown.message

    play(urls, act)


# ---- everything else -----------------------------------------------------------------------------------------------


def test_models_health_ready_status_story_and_metrics_answer(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        assert (await front.get("/health")).status == 200
        assert (await front.get("/ready")).json["healthy_workers"] == 2
        assert (await front.get("/v1/models")).json["data"][0]["id"] == "tiny"
        assert (await front.get("/model_info")).json["weight_version"] == "0"
        assert (await front.complete(model="tiny")).json["model"] == "tiny"
        await front.generate(stream=True)
        status = (await front.get("/status")).json
        assert sorted(one["url"] for one in status["workers"]) == sorted(urls)
        assert status["gateway"]["open"] == 0
        worker = status["workers"][0]["name"]
        assert (await front.get(f"/story/{worker}")).json["chapters"]
        page = (await front.get("/metrics")).text
        assert 'trimtab_rollout_workers{state="active"} 2.0' in page
        assert 'trimtab_rollout_http_answers_total{door="completions",status="200"} 1.0' in page
        assert 'trimtab_rollout_http_answers_total{door="generate",status="200"} 1.0' in page
        assert "trimtab_rollout_tokens_total 16.0" in page
        assert "trimtab_rollout_load_ratio 0.0" in page

    play(urls, act, model_name="tiny")


def test_without_a_name_the_model_is_called_as_the_engines_call_it(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        name = (await front.get("/v1/models")).json["data"][0]["id"]
        assert name.endswith(".gguf")
        assert (await front.complete(model=name)).json["model"] == name
        other = await front.complete(model="gpt-99")
        assert (other.status, other.json["error"]["code"], other.json["error"]["param"]) == (
            404, "model_not_found", "model",
        )  # fmt: skip

    play(urls, act)


def test_ready_says_why_nobody_could_serve() -> None:
    async def act(front: Front) -> None:
        got = await front.get("/ready")
        assert (got.status, got.message) == (503, "no worker could serve: there is none")
        assert (await front.get("/health")).status == 200
        text = await front.complete("some text")
        assert (text.status, text.json["error"]["code"]) == (503, "no_reader")
        field = await front.complete(min_p=0.5)
        assert (field.status, field.json["error"]["param"]) == (503, "min_p")

    play([], act, model_name="tiny")


def test_workers_join_drain_resume_and_leave_over_http(urls: list[str]) -> None:
    async def act(front: Front) -> None:
        async def change(method: str, path: str, body: Any = None) -> Any:
            got = await front.ask(method, path, body, headers=BEARER)
            assert got.status in (200, 202), got.text
            return got.json

        joined = await change("POST", "/workers", {"url": urls[0], "worker_type": "regular"})
        assert joined["status"] == "accepted"
        worker = joined["worker_id"]
        assert (await change("POST", "/workers", {"url": urls[0] + "/"}))["worker_id"] == worker, "not a second time"
        listed = (await front.get("/workers")).json
        assert [(one["url"], one["is_healthy"], one["load"]) for one in listed["workers"]] == [(urls[0], True, 0)]
        assert (await front.complete()).status == 200
        second = (await change("POST", f"/add_worker?url={urls[1]}"))["worker_id"]
        assert (await front.get("/list_workers")).json == {"urls": urls}
        drained = await change("POST", f"/workers/{second}/drain", {"deadline_s": 1, "why": "a look"})
        assert drained["state"] in ("draining", "inactive")
        await change("POST", f"/workers/{second}/resume")
        assert await front.pool.until(lambda: front.state(second) is WorkerState.active, 10)
        await change("DELETE", f"/workers/{second}?deadline_s=1")
        assert await front.pool.until(lambda: len(front.pool.workers()) == 1, 10)
        await change("POST", "/scale", {"workers": 1, "for_s": 60})
        assert (await front.get("/status")).json["scaling"]["by_hand"]["workers"] == 1
        await change("DELETE", "/scale")
        assert (await front.get("/status")).json["scaling"]["by_hand"] is None
        assert (await front.get(f"/workers/{second}")).status == 404

    play([], act, model_name="tiny")


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    async def act(front: Front) -> None:
        pool = RolloutPool()
        second = Gateway(pool, GatewaySettings(TOKEN, port=front.gateway.port))
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1 port {front.gateway.port}"):
            await second.start()
        await second.stop()
        with pytest.raises(InputError, match="runs already"):
            await front.gateway.start()

    play([], act)
