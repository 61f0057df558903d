"""From the ``prompt``, ``content`` and ``tokens`` fields of a request to token ids.

The accepted forms are llama-server's (``tokenize_input_prompts`` and ``tokenize_mixed`` in
tools/server/server-common.cpp): a string, an array of token ids, an array that mixes both, an object with
``prompt_string``, or an array of these, which is several prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from loraproxy.errors import InvalidRequest, NotSupported

Tokens = tuple[int, ...]

ELEMENT_FORMS = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, '
    "or a list of mixed strings & tokens."
)


class Vocabulary(Protocol):
    """What reading a request needs of a model's vocabulary."""

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary; ids are 0 to ``n_vocab - 1``."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; ``special``: also of control tokens."""


def is_token(value: Any) -> bool:
    """True for a JSON integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def checked_tokens(vocab: Vocabulary, tokens: Sequence[int], what: str) -> Sequence[int]:
    """``tokens`` themselves. Raises InvalidRequest for an id that the vocabulary does not have."""
    for token in tokens:
        if not 0 <= token < vocab.n_vocab:
            raise InvalidRequest(f"{what} contains invalid tokens: {token} is not between 0 and {vocab.n_vocab - 1}")
    return tokens


def tokenize_mixed(vocab: Vocabulary, parts: Any, what: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """Token ids of a string or of an array of strings and ids; special tokens are added to a leading string only.

    Raises InvalidRequest, naming the field ``what``.
    """
    if isinstance(parts, str):
        return vocab.tokenize(parts, add_special=add_special, parse_special=parse_special)
    if not isinstance(parts, list):
        raise InvalidRequest(f'"{what}" must be a string or an array of strings and token ids')
    tokens: list[int] = []
    for position, part in enumerate(parts):
        if isinstance(part, str):
            add = add_special and position == 0
            tokens += vocab.tokenize(part, add_special=add, parse_special=parse_special)
        elif is_token(part):
            tokens += checked_tokens(vocab, [part], what)
        else:
            raise InvalidRequest(f'"{what}" must hold only strings and token ids')
    return tokens


def _one_prompt(vocab: Vocabulary, prompt: Any) -> Tokens:
    if isinstance(prompt, dict) and "prompt_string" in prompt:
        if "multimodal_data" in prompt:
            raise NotSupported("Multimodal data provided, but this server takes text only.")
        prompt = prompt["prompt_string"]
    elif isinstance(prompt, list):
        if not all(isinstance(part, str) or is_token(part) for part in prompt):
            raise InvalidRequest(ELEMENT_FORMS)
    elif not isinstance(prompt, str):
        raise InvalidRequest(ELEMENT_FORMS)
    return tuple(tokenize_mixed(vocab, prompt, "prompt", add_special=True, parse_special=True))


def tokenize_prompts(vocab: Vocabulary, prompt: Any) -> list[Tokens]:
    """Every prompt of a request's ``prompt`` field as token ids. Raises InvalidRequest."""
    if isinstance(prompt, list) and not any(is_token(part) for part in prompt):
        if not prompt:
            raise InvalidRequest('"prompt" must not be empty')
        return [_one_prompt(vocab, one) for one in prompt]
    return [_one_prompt(vocab, prompt)]


def piece_json(piece: bytes) -> str | list[int]:
    """A token's text for ``with_pieces``: a string, or the byte values where it is no valid UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(vocab: Vocabulary, tokens: Sequence[int]) -> str:
    """The text of ``tokens``, control tokens as text; invalid UTF-8 becomes U+FFFD."""
    return b"".join(vocab.piece(token, special=True) for token in tokens).decode(errors="replace")
