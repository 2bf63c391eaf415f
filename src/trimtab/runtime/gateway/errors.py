"""Refusals as data: status, message, field. Each API formats them its own way."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError
from trimtab.core.reasons import ReasonCode
from trimtab.runtime.rollout.sampling import RefusedError, Sample


class Refusal(Exception):  # noqa: N818 - a response, not a fault
    """An error response."""

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
        """In OpenAI's format."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def plain(self) -> dict[str, object]:
        """In SGLang's and its router's format."""
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
    return Refusal(400, message, param=param, code="invalid_value")


def refusal_for_error(error: TrimtabError) -> Refusal:
    """Error of the pool as a refusal."""
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
    """Failed sample as a refusal."""
    reason = sample.reason
    return Refusal(_STATUSES.get(reason.code, 503), " ".join(reason.sentence.split()), code=reason.code.value)


def whole_s(seconds: float) -> int:
    """For Retry-After, in whole seconds."""
    return max(1, math.ceil(seconds))
