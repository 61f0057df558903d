"""What the metrics say of a request that generates: under which adapters it ran, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from loraproxy.errors import ApiError
from loraproxy.metrics import Metrics


@dataclass
class Counted:
    """One request; its handler fills in what it finds out."""

    names: dict[int, str] = field(default_factory=dict)
    """Adapter ids to names."""
    outcome: str = "error"


@contextmanager
def counted(metrics: Metrics, endpoint: str) -> Iterator[Counted]:
    """Count the request that the block answers, whatever becomes of it."""
    request = Counted()
    try:
        yield request
    except ApiError as error:
        request.outcome = outcome_of(error.status)
        raise
    except asyncio.CancelledError:
        request.outcome = "cancelled"
        raise
    finally:
        metrics.count(endpoint, tuple(request.names.values()), request.outcome)


def outcome_of(status: int) -> str:
    """The outcome that an answer's HTTP status means."""
    if status < 400:
        return "ok"
    if status < 500:
        return "refused"
    return "unavailable" if status == 503 else "error"
