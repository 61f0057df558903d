"""Request bodies: read within the limit, parsed once, strictly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from aiohttp import web

from loraproxy.errors import InvalidRequest, PayloadTooLarge, RequestTimeout
from loraproxy.pool.tasks import cancelled

STALLED_SECONDS = 60.0
"""Without one more byte of a body after which the rest is no longer waited for."""
T = TypeVar("T")


async def unless_stalled(request: web.Request, reading: Coroutine[Any, Any, T]) -> T:
    """What ``reading``, which reads the body, returns; however long that takes, while some of the body comes.

    Raises RequestTimeout where nothing of it came for a while.
    """
    content = request.content
    if content.is_eof():
        return await reading  # all of it is here
    task = asyncio.create_task(reading)
    try:
        while not task.done():
            received = content.total_bytes
            await asyncio.wait({task}, timeout=STALLED_SECONDS)
            if not task.done() and not content.is_eof() and content.total_bytes == received:
                raise RequestTimeout(
                    f"nothing of the request body came for {STALLED_SECONDS:g} s; {received} bytes had come before"
                )
        return task.result()
    finally:
        await cancelled(task)


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises PayloadTooLarge for more than the application's ``client_max_size``, InvalidRequest for
    a body that is broken as a message, RequestTimeout for one that does not come.
    """
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:
        return await unless_stalled(request, request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit) from error
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).removeprefix("400, message:").split())
        raise InvalidRequest(f"the request body cannot be read: {reason}") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest for anything else, whatever the Content-Type says, as llama-server."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {kind(value)}")
    return value


def parse_json(data: bytes) -> Any:
    """JSON as RFC 8259 has it: no NaN, no Infinity. Raises InvalidRequest that says what is wrong and where."""
    if not data:
        raise InvalidRequest("the request body is empty; it must be JSON")
    try:
        # utf-8-sig: llama-server's parser skips a byte order mark, too.
        return json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise InvalidRequest(f"the request body is not JSON: {error.msg} at {place}") from error
    except RecursionError as error:
        raise InvalidRequest("the request body is nested too deeply") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise InvalidRequest(f"the request body is not JSON this server can read: {error}") from error


def dump_json(value: object) -> bytes:
    """``value`` as compact JSON. Raises InvalidRequest for what JSON text cannot say.

    That is a number too large for a double, which was read as infinite, and half of a surrogate pair.
    """
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("a string in the request body has a lone surrogate, which is no Unicode text") from error
    except ValueError as error:
        raise InvalidRequest("the request body has a number that is out of range") from error
    except RecursionError as error:
        raise InvalidRequest("the request body is nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the request body is not JSON: {name} is not a JSON number")


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit} bytes (http.max_body)")


def kind(value: object) -> str:
    """``value``'s type in JSON's words."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
