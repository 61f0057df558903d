"""What the HTTP server does about connections that make trouble: how many it can hold, and what it says of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from loraproxy.errors import ApiError, InvalidRequest, ServerError

log = logging.getLogger(__name__)

_MAX_REASON = 300


class _Connection(web.RequestHandler):
    """A connection that answers what is no HTTP with llama-server's error body, where aiohttp has plain text."""

    __slots__ = ()

    def handle_error(self, *args: Any, **kwargs: Any) -> web.StreamResponse:
        """aiohttp's answer to a request that reaches no application, in our form."""
        plain = super().handle_error(*args, **kwargs)
        reason = " ".join((plain.text or "").split()) if isinstance(plain, web.Response) else plain.reason
        error: ApiError = ServerError("internal error")
        if plain.status < 500:
            error = InvalidRequest(f"this is no HTTP request that can be served: {reason[:_MAX_REASON]}")
            error.status = plain.status
        answer = web.json_response(error.body(), status=error.status)
        answer.force_close()
        return answer


class Runner(web.AppRunner):
    """aiohttp's, for an application whose every error is JSON."""

    @property
    def server(self) -> Any:
        """What makes the protocol of each connection."""
        make = super().server
        return None if make is None else _connections_of(make)


def _connections_of(make: Callable[[], web.RequestHandler]) -> Callable[[], web.RequestHandler]:
    def connection() -> web.RequestHandler:
        made = make()
        made.__class__ = _Connection  # of the same layout; aiohttp takes no other class for connections
        return made

    return connection


def raise_open_files_limit() -> None:
    """Let this process and its worker have as many connections open as the system allows; often 1024 by default."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # macOS refuses "unlimited"
            log.debug("the limit of open files stays at %d: %s", soft, error)


def server_log() -> logging.Logger:
    """The logger for aiohttp's server. A client's broken HTTP is a note of one line, not an error of ours."""
    logger = logging.getLogger(f"{__name__}.server")
    logger.filters = [_leave_out_broken_requests]
    return logger


def _leave_out_broken_requests(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
        return True
    log.debug("a client sent broken HTTP: %.200s", " ".join(str(error).split()))
    return False
