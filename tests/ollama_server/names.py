"""Model names (types/model/name.go) and digests (manifest/paths.go)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .refusals import Refusal

HOST, NAMESPACE, TAG = "models.example", "library", "latest"
"""What names mean where they do not say it. The host is not the real server's, which no client of ours ever names."""
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}")
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")


@dataclass(frozen=True)
class Name:
    """A valid model name with all its parts."""

    host: str
    namespace: str
    model: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name that ``text`` means, defaults filled in; None if it is not valid."""
        rest = text.removeprefix("https://").removeprefix("http://")
        tag = TAG
        if ":" in rest.rpartition("/")[2]:
            rest, _, tag = rest.rpartition(":")
        parts = rest.split("/")
        if len(parts) > 3:
            return None
        host, namespace, model = [HOST, NAMESPACE, ""][: 3 - len(parts)] + parts
        valid = _HOST.fullmatch(host) and all(_PART.fullmatch(part) for part in (namespace, model, tag))
        return cls(host, namespace, model, tag) if valid and "." not in namespace else None

    def __str__(self) -> str:
        return f"{self.host}/{self.namespace}/{self.model}:{self.tag}"

    @property
    def shortest(self) -> str:
        """Without the parts that are the defaults; the tag is always shown."""
        if self.host != HOST:
            return str(self)
        if self.namespace != NAMESPACE:
            return f"{self.namespace}/{self.model}:{self.tag}"
        return f"{self.model}:{self.tag}"


def blob_file(digest: str) -> str:
    """The file name of a blob. Raises Refusal for what is no digest."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise Refusal(400, "invalid digest format")
    return f"sha256-{match[1]}"
