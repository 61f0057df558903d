"""Ending a task."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Return when ``task``, cancelled unless it was done, is done; what it raised is of no interest."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # nobody else will look at it
