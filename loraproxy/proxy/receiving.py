"""Receiving an uploaded adapter: streamed to disk within a bound, never held in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from loraproxy.adapters.names import shorten
from loraproxy.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE
from loraproxy.adapters.uploads import GGUF_NAME
from loraproxy.errors import InvalidRequest, PayloadTooLarge, ServerError

_BLOCK = 1 << 20
_MAX_PARTS = 8
_MAX_FIELD = 16 * 1024
_MAX_REASON = 200
_MAX_LINES = 256 * 1024
"""Bytes of a form in its lines, which are what is no file: boundaries, headers, and text before the first part."""

_BROKEN = (ValueError, AssertionError, RuntimeError, aiohttp.ClientError, HttpProcessingError, web.RequestPayloadError)
"""What aiohttp raises for one broken form or another."""

_FORMS = (
    "send a GGUF file as the body (application/octet-stream), or multipart/form-data with the files "
    f"{CONFIG_FILE} and {WEIGHTS_FILE}, or with one .gguf file"
)


class Receiver:
    """Writes the files of one upload into ``folder``, ``limit`` bytes at most."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._received = 0

    async def body(self, request: web.Request) -> Path:
        """The request's body as a GGUF file. Raises PayloadTooLarge, InvalidRequest and ServerError."""
        if (request.content_length or 0) > self._limit:
            raise self._too_large()
        try:
            await self._write(GGUF_NAME, _blocks(request.content.readany))
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the upload cannot be read: {_reason(error)}") from error
        if not self._received:
            raise InvalidRequest(f"the upload is empty; {_FORMS}")
        return self._folder / GGUF_NAME

    async def form(self, request: web.Request) -> tuple[Path, dict[str, str]]:
        """The adapter in a multipart form, and the form's other fields. Raises as :meth:`body` does."""
        fields: dict[str, str] = {}
        files: set[str] = set()
        try:
            reader = aiohttp.MultipartReader(
                request.headers, cast(aiohttp.StreamReader, _BoundedLines(request.content))
            )
            async for part in _parts(reader):
                if part.filename is None:
                    fields[part.name or ""] = await self._field(part)
                    continue
                name = self._file_name(part.filename)
                if name in files:
                    raise InvalidRequest(f"the form has {name} twice; {_FORMS}")
                files.add(name)
                await self._write(name, _blocks(part.read_chunk))
        except _BROKEN as error:
            raise InvalidRequest(f"the form cannot be read: {_reason(error)}") from error
        if files == {GGUF_NAME}:
            return self._folder / GGUF_NAME, fields
        if files == {CONFIG_FILE, WEIGHTS_FILE}:
            return self._folder, fields
        raise InvalidRequest(f"the form has {', '.join(sorted(files)) or 'no files'}; {_FORMS}")

    def _file_name(self, given: str) -> str:
        name = given.replace("\\", "/").rpartition("/")[2]
        if name.endswith(".gguf"):
            return GGUF_NAME
        if name in (CONFIG_FILE, WEIGHTS_FILE):
            return name
        raise InvalidRequest(f"the form has a file {shorten(given)}; {_FORMS}")

    async def _field(self, part: aiohttp.BodyPartReader) -> str:
        data = bytearray()
        async for block in _blocks(part.read_chunk):
            data += block
            if len(data) > _MAX_FIELD:
                raise InvalidRequest(f"the form's field {shorten(part.name)} is longer than {_MAX_FIELD} bytes")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"the form's field {shorten(part.name)} is not UTF-8") from None

    async def _write(self, name: str, blocks: AsyncIterator[bytes]) -> None:
        try:
            with (self._folder / name).open("xb") as file:
                async for block in blocks:
                    self._received += len(block)
                    if self._received > self._limit:
                        raise self._too_large()
                    await asyncio.to_thread(file.write, block)
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            raise ServerError(f"the upload cannot be stored: {error.strerror or error}") from error

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the adapter is larger than {self._limit} bytes (--max-adapter-size)")


class _BoundedLines:
    """A stream for aiohttp's reader, which takes any number of lines before a form's first part."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream
        self._left = _MAX_LINES

    async def readline(self, **limits: Any) -> bytes:
        line = await self._stream.readline(**limits)
        self._left -= len(line)
        if self._left < 0:
            raise InvalidRequest(f"the form has more than {_MAX_LINES} bytes outside of its files; {_FORMS}")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _reason(error: Exception) -> str:
    return " ".join(str(error).removeprefix("400, message:").split())[:_MAX_REASON] or "it is broken"


async def _parts(reader: aiohttp.MultipartReader) -> AsyncIterator[aiohttp.BodyPartReader]:
    count = 0
    while (part := await reader.next()) is not None:
        count += 1
        if not isinstance(part, aiohttp.BodyPartReader) or count > _MAX_PARTS:
            raise InvalidRequest(f"the form is not an adapter's; {_FORMS}")
        yield part


async def _blocks(read: Callable[[], Awaitable[bytes]]) -> AsyncIterator[bytes]:
    """What ``read`` gives until it gives nothing, in blocks worth a thread each."""
    gathered = bytearray()
    while chunk := await read():
        gathered += chunk
        if len(gathered) >= _BLOCK:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)
