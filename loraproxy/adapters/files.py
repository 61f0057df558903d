"""Reading a whole file that nobody vouches for."""

from __future__ import annotations

import stat
from pathlib import Path

from loraproxy.adapters.checks import Refused


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. Raises Refused with the reason.

    The whole content is read once, so that what is hashed is what is parsed, whoever writes to the file meanwhile.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{path.name} is not a regular file")
        if status.st_size > limit:
            raise Refused(f"{path.name} has {status.st_size} bytes; at most {limit} are supported")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise Refused(f"{path.name}: {error.strerror or error}") from None
    if len(data) > limit:
        raise Refused(f"{path.name} grew while it was read")
    return data
