"""What is refused, as data: a status, a sentence, and the field at fault. Each dialect has its own way to say it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError
from trimtab.core.reasons import ReasonCode
from trimtab.runtime.rollout.sampling import RefusedError, Sample


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """An answer other than the one that was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def openai(self) -> dict[str, object]:
        """As OpenAI's interface says it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def plain(self) -> dict[str, object]:
        """As SGLang and its router say it."""
        return {"error": {"message": self.message, "code": self.code or self.status, "param": self.param}}


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

_STATUSES = {
    ReasonCode.too_late: 504,
    ReasonCode.version_gone: 409,
    ReasonCode.refused: 400,
    ReasonCode.never_fits: 400,
    ReasonCode.retries_used: 502,
    ReasonCode.cancelled: 503,
}


def invalid_value(param: str, message: str) -> Refusal:
    """A field that is wrong."""
    return Refusal(400, message, param=param, code="invalid_value")


def refusal_for_error(error: TrimtabError) -> Refusal:
    """An error of the pool as an answer."""
    message = " ".join(part for part in (error.what, error.hint and f"({error.hint})") if part)
    if isinstance(error, RefusedError):
        return Refusal(
            429, message, code=error.reason.code.value, headers={"retry-after": str(whole_s(error.retry_after_s))}
        )
    if isinstance(error, InputError):
        return Refusal(400, message, code="invalid_request")
    if isinstance(error, InfeasibleError):
        return Refusal(409, message, code="infeasible")
    return Refusal(503, message, code="unreachable")


def refusal_for_sample(sample: Sample) -> Refusal:
    """A request that has no answer, as an answer."""
    reason = sample.reason
    return Refusal(_STATUSES.get(reason.code, 503), " ".join(reason.sentence.split()), code=reason.code.value)


def whole_s(seconds: float) -> int:
    """For Retry-After, which knows whole seconds only."""
    return max(1, math.ceil(seconds))
