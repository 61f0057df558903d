"""Every error a client can see, each with llama-server's status code, type and body.

The body is llama-server's: ``{"error": {"code": 400, "message": "...", "type": "invalid_request_error"}}``
(``format_error_response`` in tools/server/server-common.cpp).
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error with an HTTP status; ``body()`` is what the client receives."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.message = message
        self.extra = extra

    def body(self) -> dict[str, Any]:
        """The JSON body: ``code``, ``message``, ``type`` and any extra fields of this error."""
        return {"error": {"code": self.status, "message": self.message, "type": self.type, **self.extra}}


class InvalidRequest(ApiError):
    """The request itself is wrong; the message names what was wrong and what would be right."""

    status = 400
    type = "invalid_request_error"


class UnknownAdapter(InvalidRequest):
    """A request named an adapter that is not registered; the message lists the known names."""


class InvalidAdapterFile(InvalidRequest):
    """An adapter file that cannot be applied to this base model; the message names tensor and reason."""


class AdapterChanged(ApiError):
    """An adapter's file is not the one that was registered; between worker and proxy only."""

    status = 409
    type = "adapter_changed_error"


class RequestTimeout(ApiError):
    """The rest of a request's body does not come."""

    status = 408
    type = "invalid_request_error"


class Conflict(ApiError):
    """What was asked for contradicts what there is; the message says what to do instead."""

    status = 409
    type = "invalid_request_error"


class ContextExceeded(ApiError):
    """The prompt does not fit the context of one slot."""

    status = 400
    type = "exceed_context_size_error"

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"request ({n_prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens),"
            " try increasing it",
            n_prompt_tokens=n_prompt_tokens,
            n_ctx=n_ctx,
        )


class Unauthorized(ApiError):
    """A missing or wrong API key."""

    status = 401
    type = "authentication_error"


class NotFound(ApiError):
    """No such path."""

    status = 404
    type = "not_found_error"


class MethodNotAllowed(ApiError):
    """The path exists, but not for this method."""

    status = 405
    type = "invalid_request_error"


class PayloadTooLarge(ApiError):
    """A request body over the limit."""

    status = 413
    type = "invalid_request_error"


class ServerError(ApiError):
    """A fault on our side."""


class NotSupported(ApiError):
    """Something llama-server does that this server does not do (yet)."""

    status = 501
    type = "not_supported_error"


class WorkerFailed(ApiError):
    """The worker died or broke the connection while it held this request."""

    status = 502
    type = "server_error"


class Unavailable(ApiError):
    """Loading, overloaded or shutting down: try again later."""

    status = 503
    type = "unavailable_error"

    def __init__(self, message: str, *, retry_after: int | None = None, **extra: Any) -> None:
        super().__init__(message, **extra)
        self.retry_after = retry_after


class WorkerUnreached(Unavailable):
    """The worker saw nothing of this request, so that it may be tried once more, elsewhere."""


class StartFailed(Exception):
    """The server cannot start; the message is what the command line prints, without a traceback."""


class CommandFailed(Exception):
    """A command cannot do what was asked; the message is what the command line prints, without a traceback."""
