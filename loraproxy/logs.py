"""Logs: lines of text or JSON objects on stderr, each with the id of the request it belongs to."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Literal

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that is being served; empty: none is. Tasks inherit it from where they are created."""

SANE_ID = re.compile(r"[!-~]{1,128}")
"""What an id that comes from outside may be: it goes into headers and log lines."""

ID_HEADER = "X-Request-Id"

ACCESS = logging.getLogger("loraproxy.access")
"""A line for every finished request; off unless it is asked for."""

_TEXT = "%(asctime)s %(levelname)s %(message)s"


def id_header() -> dict[str, str]:
    """The header that passes the current request's id on; none where there is no request."""
    name = REQUEST_ID.get()
    return {ID_HEADER: name} if name else {}


def with_request_id(record: logging.LogRecord) -> bool:
    """A filter for handlers that lets everything pass, with the current request's id unless it has one already."""
    if not hasattr(record, "request_id"):
        record.request_id = REQUEST_ID.get()
    return True


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What was logged beside the message, as ``extra={"fields": {...}}``."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


class TextFormatter(logging.Formatter):
    """The message, then the fields as ``name=value`` and the request's id, on its first line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        parts = [super().formatMessage(record), *(f"{name}={value}" for name, value in fields_of(record).items())]
        if name := getattr(record, "request_id", ""):
            parts.append(f"request={name}")
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC, RFC 3339), level, logger, message, request_id, the fields, and exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := getattr(record, "request_id", ""):
            line["request_id"] = name
        line = {**fields_of(record), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(
    style: Literal["text", "json"] = "text", level: Literal["debug", "info", "warning", "error"] = "info"
) -> None:
    """Log to stderr. ``level`` is for this package; what others tell is shown from ``info`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter(_TEXT, datefmt="%H:%M:%S"))
    handler.addFilter(with_request_id)
    least = getattr(logging, level.upper())
    logging.basicConfig(handlers=[handler], level=max(least, logging.INFO))
    logging.getLogger("loraproxy").setLevel(least)
    _quieten_libraries()
    ACCESS.setLevel(logging.INFO if least <= logging.DEBUG else logging.WARNING)


def show_requests() -> None:
    """Have a line for every finished request, whatever the level."""
    ACCESS.setLevel(logging.INFO)


def set_up_worker() -> None:
    """Log to stderr in the form that the proxy reads: time, level, logger, message, and the request's id."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handler.addFilter(with_request_id)
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    _quieten_libraries()


def _quieten_libraries() -> None:
    logging.getLogger("gguf").setLevel(logging.WARNING)  # it tells of every file it writes
