"""What clients send: JSON bodies and their fields, fields of engines, headers of trimtab (`x-trimtab-*`).

Each field has a type and a range, and none is ignored: fields that were not taken remain in `rest`, and the caller
decides about them. `null` counts as absent. Fields of engines are passed on if every kind of engine that is up takes
them, else refused: some engines silently drop an unknown field and others change the answer. A field with a neutral
value is dropped: a request with passed-on fields restarts after an interruption, unless they concern single tokens. An
unknown `x-trimtab-` header is refused, because its sender relies on it.

Large bodies are parsed in another process: the standard parser holds the GIL throughout, seconds for a list of millions
of token ids, in which no other client would get a token. One large body is parsed at a time, and only a few may wait.
"""

from __future__ import annotations

import asyncio
import json
import marshal
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any

import msgspec

from trimtab.core.errors import nearest
from trimtab.core.frozen import Message
from trimtab.core.plain_data import fault_of
from trimtab.model.rollout import DEFAULT_CLASS
from trimtab.runtime.gateway.exchange import Headers, Refusal, invalid_value, to_json
from trimtab.runtime.rollout.request_api import RequestOptions

ServedKinds = Callable[[], Collection[str]]
"""Kinds of engines that are up; called only if needed."""

MAX_WAITING = 16

_PARSER = """
import json, marshal, sys
try:
    answer = marshal.dumps((True, json.loads(sys.stdin.buffer.read().decode())))
except (ValueError, RecursionError) as fault:
    answer = marshal.dumps((False, str(fault)))
sys.stdout.buffer.write(answer)
"""

LARGE_BODY_BYTES = 2**20
"""Larger bodies are parsed in another process."""

MAX_TOKEN_IDS = 2**20
"""Per call, over all prompts: checking and sending them delays other requests."""

_TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...]
_MAX_NUMBER = 10**15  # of numbers without a range; beyond it arithmetic is not exact


class BodyFields:
    """A JSON object."""

    def __init__(self, body: Any, *, within: str = "") -> None:
        if not isinstance(body, dict):
            raise Refusal(400, f"{within or 'the body'} is no JSON object", param=within or None, code="invalid_value")
        self.rest: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
        self._prefix = f"{within}." if within else ""

    def take(self, name: str) -> Any:
        """Any value; None if absent."""
        return self.rest.pop(name, None)

    def wrong(self, name: str, message: str) -> Refusal:
        return invalid_value(self._prefix + name, f"{self._prefix}{name}: {message}")

    def _typed(self, name: str, default: Any, kind: type, what: str) -> Any:
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, f"{what}, not {_shown(value)}")
        return default if value is None else value

    def boolean(self, name: str, default: bool = False) -> bool:
        return bool(self._typed(name, default, bool, "true or false"))

    def integer(self, name: str, default: Any, minimum: int | None = None, maximum: int | None = None) -> Any:
        """The default may be None."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise self.wrong(name, f"a whole number, not {_shown(value)}")
        if not (-_MAX_NUMBER if minimum is None else minimum) <= value <= (_MAX_NUMBER if maximum is None else maximum):
            raise self.wrong(name, f"{_shown(value)} is not {_range(minimum, maximum)}")
        return value

    def number(self, name: str, default: float, minimum: float | None = None, maximum: float | None = None) -> float:
        """A finite number."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not -_MAX_NUMBER <= value <= _MAX_NUMBER:  # excludes NaN
            raise self.wrong(name, f"a number, not {_shown(value)}")
        if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            raise self.wrong(name, f"{value} is not {_range(minimum, maximum)}")
        return float(value)

    def text(self, name: str, default: str = "") -> str:
        return str(self._typed(name, default, str, "a string"))

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or several; none of them empty."""
        value = self.take(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.wrong(name, f"a string or a list of strings, not {_shown(value)}")
        if "" in found:
            raise self.wrong(name, "an empty string would end every answer at once")
        return tuple(found)

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.take(name)
        return () if value is None else self.as_ids(name, value)

    def as_ids(self, name: str, value: Any) -> tuple[int, ...]:
        try:
            return msgspec.convert(value, _TokenIds)
        except ValueError:  # also of lone surrogates
            raise self.wrong(name, "a list of token ids, whole numbers of 0 or more") from None

    def prompts(self, name: str, given: list[Any]) -> list[tuple[int, ...]]:
        """Token ids of one prompt or several. Their number is checked before their content."""
        nested = isinstance(given[0], list)
        ids = sum(len(prompt) for prompt in given if isinstance(prompt, list)) if nested else len(given)
        if ids > MAX_TOKEN_IDS:
            raise self.wrong(name, f"{ids} token ids in one call; the maximum is {MAX_TOKEN_IDS}")
        return [self.as_ids(name, prompt) for prompt in given] if nested else [self.as_ids(name, given)]

    def neutral(self, table: Mapping[str, Sequence[Any]]) -> None:
        for name in list(self.rest):
            if name in table and any(_same(self.rest[name], value) for value in table[name]):
                del self.rest[name]


def parsed(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):
        pass  # the standard parser also takes NaN, lone surrogates and long numbers, and says what is wrong
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as fault:
        raise not_json(str(fault)) from None


def not_json(why: str) -> Refusal:
    return Refusal(400, f"the body is no JSON: {why[:100]}", code="invalid_json")


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)


def _range(minimum: float | None, maximum: float | None) -> str:
    if maximum is None:
        return f"{minimum} or more, and at most {_MAX_NUMBER}" if minimum is not None else f"within {_MAX_NUMBER}"
    return f"{minimum} to {maximum}" if minimum is not None else f"{maximum} or less"


def _shown(value: Any) -> str:
    if type(value) is int and abs(value) > _MAX_NUMBER:
        return "a number of many digits"  # repr refuses very long ones
    return repr(value)[:60]


class BodyParser:
    """Parses the bodies of a gateway, large ones within `parse_s`."""

    def __init__(self, parse_s: float = 60.0) -> None:
        self._parse_s = parse_s
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def parsed(self, body: bytes) -> Any:
        if len(body) <= LARGE_BODY_BYTES:
            return parsed(body)
        if self._waiting >= MAX_WAITING:
            raise Refusal(
                503, f"{MAX_WAITING} large bodies are already waiting to be parsed", code="too_many",
                headers={"retry-after": "1"},
            )  # fmt: skip
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.wait_for(_parse_in_process(body), self._parse_s)
        except asyncio.TimeoutError:
            raise Refusal(503, f"the body was not parsed within {self._parse_s:g} s", code="timeout") from None
        finally:
            self._waiting -= 1


async def _parse_in_process(body: bytes) -> Any:
    pipe = asyncio.subprocess.PIPE
    parser = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _PARSER, stdin=pipe, stdout=pipe, env={}
    )
    try:
        answer, _ = await parser.communicate(body)
    finally:
        if parser.returncode is None:
            parser.kill()
            await parser.wait()
    if parser.returncode != 0:
        raise Refusal(503, f"the body was not parsed: the parser ended with {parser.returncode}", code="fault")
    ok, value = marshal.loads(answer)
    if not ok:
        raise not_json(value)
    return value


# ---- fields of engines

_ALL = frozenset({"frequency_penalty", "presence_penalty", "min_p", "logit_bias", "ignore_eos"})
KNOWN: dict[str, frozenset[str]] = {
    "vllm": _ALL
    | {
        "repetition_penalty", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
        "allowed_token_ids", "bad_words", "structured_outputs", "response_format", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "repetition_detection", "vllm_xargs",
    },
    "sglang": _ALL
    | {
        "repetition_penalty", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "json_schema",
        "regex", "ebnf", "structural_tag", "stop_regex", "custom_params",
    },
    "llamacpp": _ALL
    | {
        "repeat_penalty", "repeat_last_n", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "mirostat",
        "mirostat_tau", "mirostat_eta", "dynatemp_range", "dynatemp_exponent", "dry_multiplier", "dry_base",
        "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "grammar", "json_schema", "samplers",
        "cache_prompt",
    },
}  # fmt: skip
"""Fields of each kind of engine, beyond the common ones."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "bad_words": ([],),
    "custom_params": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "log_metrics": (True, False),
    "stream_interval": (1,),
}
"""Values without effect."""

PER_TOKEN_FIELDS = frozenset(
    {
        "min_p", "logit_bias", "ignore_eos", "allowed_token_ids", "skip_special_tokens", "include_stop_str_in_output",
        "spaces_between_special_tokens", "no_stop_trim", "cache_prompt",
    }
)  # fmt: skip
"""Fields that act on single tokens, so an interruption does not matter."""


MAX_NUMBER = 2**20
"""Limit of numeric engine fields. Some engines allocate as much as they say."""

MAX_FIELD_BYTES = 2**18
"""Limit of an engine field, as JSON."""


def engine_extras(
    rest: Mapping[str, Any], kinds: Collection[str], known: Collection[str], prefix: str = ""
) -> dict[str, Any]:
    """Fields to pass on, if every kind of engine that is up takes them; else raises a refusal."""
    for name in rest:
        for kind in sorted(kinds):
            if kind in KNOWN and name not in KNOWN[kind]:
                near = nearest(name, [*known, *KNOWN[kind]])
                more = f"; did you mean {near}?" if near else ""
                raise Refusal(
                    400, f"{prefix}{name}: unknown to this gateway and its engines ({kind}){more}",
                    param=prefix + name, code="unknown_field",
                )  # fmt: skip
        if not kinds:
            raise Refusal(
                503, f"{prefix}{name} is an engine field, and no engine is up to check it against",
                param=prefix + name, code="no_worker", headers={"retry-after": "1"},
            )  # fmt: skip
        require_bounded(name, rest[name], prefix)
    return dict(rest)


def require_bounded(name: str, value: Any, prefix: str = "") -> None:
    problem = ""
    if type(value) in (int, float) and not -MAX_NUMBER <= value <= MAX_NUMBER:  # excludes NaN
        problem = f"a number within {MAX_NUMBER}"
    elif type(value) in (str, list, dict):
        fault = fault_of(value)  # among others of deep nesting, which `json` writes or not, by the Python
        if fault is not None:
            problem = fault[0]
        elif len(to_json(value)) > MAX_FIELD_BYTES:
            problem = f"at most {MAX_FIELD_BYTES} bytes"
    if problem:
        raise Refusal(400, f"{prefix}{name}: {problem}", param=prefix + name, code="invalid_value")


def may_resume(
    extra: Mapping[str, Any], seed: int | None, stop: Collection[str], kinds: Collection[str]
) -> bool | None:
    """Whether an interrupted answer may continue; None: the pool decides.

    A stop string may span the interruption, which needs detokenizing: all known kinds of engines can.
    """
    can_detokenize = not stop or KNOWN.keys() >= set(kinds)
    return True if extra and seed is None and can_detokenize and PER_TOKEN_FIELDS.issuperset(extra) else None


# ---- headers of trimtab

PREFIX = b"x-trimtab-"
HEADERS = ("class", "group", "session", "version", "at-least", "spans", "deadline-s", "details")
MAX_CHARS = 256
MAX_VERSION_DIGITS = 18


class RequestTerms(Message):
    """Terms of one call."""

    options: RequestOptions = field(default_factory=RequestOptions)
    details: bool = False  # add workers and weight versions to the answer


DEFAULT_TERMS = RequestTerms()


def read_terms(headers: Headers, deadline_s: float | None) -> RequestTerms:
    """Terms of a call; `deadline_s` is the default."""
    found = {
        name[len(PREFIX) :].decode("latin-1"): value.decode("latin-1").strip()
        for name, value in headers.items()
        if name.startswith(PREFIX)
    }
    key = headers.get(b"idempotency-key", b"").decode("latin-1").strip()
    if not found and not key and deadline_s is None:
        return DEFAULT_TERMS
    for name, value in found.items():
        if name not in HEADERS:
            near = nearest(name, HEADERS)
            raise _wrong(name, f"there is no such header{f'; did you mean x-trimtab-{near}?' if near else ''}")
        if len(value) > MAX_CHARS:
            raise _wrong(name, f"longer than {MAX_CHARS} characters")
    if len(key) > MAX_CHARS:
        raise Refusal(400, f"Idempotency-Key is longer than {MAX_CHARS} characters", param="idempotency-key")
    options = RequestOptions(
        found.get("class") or DEFAULT_CLASS,
        found.get("group", ""),
        found.get("session", ""),
        _version("version", found),
        _version("at-least", found),
        _flag("spans", found, default=True),
        key,
        _seconds("deadline-s", found, deadline_s),
    )
    return RequestTerms(options, _flag("details", found, default=False))


def _version(name: str, found: dict[str, str]) -> int | None:
    if name not in found:
        return None
    if not (found[name].isascii() and found[name].isdecimal() and len(found[name]) <= MAX_VERSION_DIGITS):
        raise _wrong(name, f"'{found[name]}' is no version: a whole number, 0 or more")
    return int(found[name])


def _flag(name: str, found: dict[str, str], *, default: bool) -> bool:
    words = {"1": True, "true": True, "0": False, "false": False}
    if name not in found:
        return default
    if found[name].lower() not in words:
        raise _wrong(name, f"'{found[name]}' is neither true nor false")
    return words[found[name].lower()]


def _seconds(name: str, found: dict[str, str], default: float | None) -> float | None:
    if name not in found:
        return default
    try:
        seconds = float(found[name])
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise _wrong(name, f"'{found[name]}' is no number of seconds above 0")
    return seconds


def _wrong(name: str, message: str) -> Refusal:
    return Refusal(400, f"x-trimtab-{name}: {message}", param=f"x-trimtab-{name}", code="invalid_header")
