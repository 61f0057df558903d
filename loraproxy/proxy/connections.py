"""What the HTTP server does about connections that make trouble: how many it can hold, and what it logs of them."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger(__name__)


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
