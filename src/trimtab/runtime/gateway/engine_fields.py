"""Fields of engines: passed on if every kind of engine that is up takes them, else refused.

Some engines silently drop an unknown field and others change the answer, so it is refused by name. A field with a
neutral value is dropped: a request with passed-on fields restarts after an interruption, unless they concern single
tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trimtab.core.errors import nearest
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.gateway.response_format import to_json

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
        try:
            problem = f"at most {MAX_FIELD_BYTES} bytes" if len(to_json(value)) > MAX_FIELD_BYTES else ""
        except RecursionError:
            problem = "lists and objects are nested too deeply"
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
