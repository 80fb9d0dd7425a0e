"""What a client is told instead of an answer."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An HTTP status and its message, in OpenAI's form.

    Parameters
    ----------
    status
        Of HTTP; below 500 the client can put it right.
    message
        One line.
    param
        The field of the body that is meant.
    code
        A word for programs.
    retry_after
        Seconds after which it may work.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param, code)
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A field that cannot be used: 400, and the message begins with its name."""
    return ApiError(400, message if param is None else f"{param}: {message}", param=param, code=code)


def shutting_down() -> ApiError:
    """503."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


def too_many(most: int, retry_after: int) -> ApiError:
    """429."""
    message = f"{most} requests are waiting already: try again later"
    return ApiError(429, message, code="queue_full", retry_after=retry_after)


def engine_failed() -> ApiError:
    """500."""
    return ApiError(500, "the engine failed while computing this; others are served", code="engine_failed")
