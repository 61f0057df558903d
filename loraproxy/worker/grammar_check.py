"""What a GBNF grammar would cost, told before llama.cpp sees it.

llama.cpp's parser recurses for every parenthesis, unrolls repetitions, and expands every rule that may stand
first; a short grammar can so overflow its stack or fill the memory, which ends the process with every request in
it. The syntax is that of ``llama_grammar_parser`` in llama.cpp's src/llama-grammar.cpp; the expansion that is
counted here is its ``llama_grammar_advance_stack``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from loraproxy.errors import InvalidRequest

MAX_CHARACTERS = 1 << 18
MAX_NESTING = 100
"""Parentheses in parentheses."""
MAX_REPETITIONS = 2000
"""llama.cpp refuses more (MAX_REPETITION_THRESHOLD)."""
MAX_ELEMENTS = 1_000_000
"""Characters, ranges and references when repetitions are unrolled."""
MAX_CHAIN = 2_000
"""Rules that start with one another."""
MAX_STARTS = 5_000
"""Ways in which a rule may go on that are followed at once."""

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t]|\#[^\r\n]*)+) | (?P<line>\r\n?|\n) | (?P<define>::=) | (?P<name>[A-Za-z0-9-]+)
      | (?P<literal>"(?:[^"\\]|\\.)*") | (?P<range>\[(?:[^\]\\]|\\.)*\]) | (?P<token>!?<[^>]*>)
      | (?P<times>\{[^}]*\}) | (?P<mark>[()|*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_TIMES = re.compile(r"\{\s*(\d{1,9})\s*(,?)\s*(\d{1,9})?\s*\}")
_CHARACTER = re.compile(r"\\(?:x..|u.{4}|U.{8}|.)|.", re.DOTALL)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


@dataclass
class _Item:
    """One element of a sequence: elements of its own or a reference, and whether it may be left out or repeated."""

    size: int
    refers_to: str = ""
    optional: bool = False
    copies: int = 1
    """How often it is written out; an endless repetition counts once more than its least."""


_Alternatives = list[list[_Item]]


@dataclass
class _Parser:
    """Recursive descent over the tokens; groups become rules of their own, as in llama.cpp."""

    tokens: list[_Token]
    rules: dict[str, _Alternatives] = field(default_factory=dict)
    elements: int = 0
    at: int = 0
    groups: int = 0

    def parse(self) -> dict[str, _Alternatives]:
        """All rules. Raises InvalidRequest for what is no GBNF or too large."""
        while self._skip(lines=True):
            name = self._take("name", "the name of a rule")
            self._skip(lines=False)
            self._take("define", "::=")
            self.rules[name.text] = self._alternatives(0)
            if self._here() not in ("line", ""):
                raise self._unexpected("the end of the line")
        return self.rules

    def _here(self) -> str:
        if self.at >= len(self.tokens):
            return ""
        token = self.tokens[self.at]
        return token.text if token.kind == "mark" else token.kind

    def _skip(self, *, lines: bool) -> bool:
        """Skip blanks and, where they mean nothing, ends of lines. False at the end."""
        while self._here() == "space" or (lines and self._here() == "line"):
            self.at += 1
        return self.at < len(self.tokens)

    def _take(self, kind: str, what: str) -> _Token:
        if self._here() != kind:
            raise self._unexpected(what)
        self.at += 1
        return self.tokens[self.at - 1]

    def _unexpected(self, what: str) -> InvalidRequest:
        if self.at >= len(self.tokens):
            return InvalidRequest(f"failed to parse grammar: it ends where {what} should be")
        token = self.tokens[self.at]
        return InvalidRequest(f"failed to parse grammar: expected {what} at character {token.at}")

    def _alternatives(self, depth: int) -> _Alternatives:
        self._skip(lines=True)
        found = [self._sequence(depth)]
        while self._here() == "|":
            self.at += 1
            self._skip(lines=True)
            found.append(self._sequence(depth))
        return found

    def _sequence(self, depth: int) -> list[_Item]:
        items: list[_Item] = []
        while (kind := self._here()) in ("literal", "range", "token", "name", ".", "(", "*", "+", "?", "times"):
            token = self.tokens[self.at]
            self.at += 1
            if kind in ("*", "+", "?", "times"):
                if not items:
                    raise InvalidRequest(f"failed to parse grammar: nothing to repeat at character {token.at}")
                self._repeat(items[-1], *_times(kind, token))
            elif kind == "(":
                items.append(self._group(depth + 1, token))
            else:
                items.append(_Item(_size(kind, token.text), token.text if kind == "name" else ""))
            self._count(items[-1])
            self._skip(lines=depth > 0)
        return items

    def _group(self, depth: int, token: _Token) -> _Item:
        if depth > MAX_NESTING:
            raise InvalidRequest(f"the grammar has more than {MAX_NESTING} parentheses in one another")
        self.groups += 1
        name = f"({self.groups}"  # no rule can bear this name
        self.rules[name] = self._alternatives(depth)
        if self._here() != ")":
            raise InvalidRequest(f"failed to parse grammar: the parenthesis at character {token.at} is not closed")
        self.at += 1
        return _Item(1, name)

    def _repeat(self, item: _Item, least: int, most: int | None) -> None:
        # an endless or optional rest becomes rules of its own, each with a copy of the item
        rest = 1 if most is None else most - least
        self.elements += rest * (item.size + 3)
        item.copies = min(item.copies * (least + rest), MAX_ELEMENTS)
        item.size = item.size * least + (1 if rest else 0)
        item.optional = item.optional or least == 0

    def _count(self, item: _Item) -> None:
        self.elements += item.size
        if self.elements > MAX_ELEMENTS:
            raise InvalidRequest(f"the grammar is too large: more than {MAX_ELEMENTS} elements with its repetitions")


def _size(kind: str, text: str) -> int:
    return len(_CHARACTER.findall(text)) - 2 if kind in ("literal", "range") else 1


def _times(kind: str, token: _Token) -> tuple[int, int | None]:
    """The least and the most repetitions; None: no limit."""
    if kind != "times":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[kind]
    match = _TIMES.fullmatch(token.text)
    if match is None or (match[3] and not match[2]):
        raise InvalidRequest(f"failed to parse grammar: expected {{m}}, {{m,}} or {{m,n}} at character {token.at}")
    least = int(match[1])
    most = (int(match[3]) if match[3] else None) if match[2] else least
    if least > MAX_REPETITIONS:
        raise InvalidRequest(f"the grammar repeats more than {MAX_REPETITIONS} times at character {token.at}")
    if most is not None and most < least:
        raise InvalidRequest(f"failed to parse grammar: {token.text} at character {token.at} has its limits reversed")
    return least, most if most is None or most <= MAX_REPETITIONS else None


def _tokens(text: str) -> list[_Token]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise InvalidRequest(f"failed to parse grammar: unexpected {text[at]!r} at character {at}")
        tokens.append(_Token(match.lastgroup, match[0], at))
        at = match.end()
    return tokens


def check_grammar(text: str) -> None:
    """Refuse a grammar that is no GBNF or that llama.cpp could not bear. Raises InvalidRequest."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"the grammar has {len(text)} characters; at most {MAX_CHARACTERS} are taken")
    if "\0" in text:
        raise InvalidRequest("the grammar has a zero character")
    rules = _Parser(_tokens(text)).parse()
    for alternatives in rules.values():
        for item in (item for sequence in alternatives for item in sequence):
            if item.refers_to and item.refers_to not in rules:
                raise InvalidRequest(f"failed to parse grammar: there is no rule '{item.refers_to}'")
    if "root" not in rules:
        raise InvalidRequest("failed to parse grammar: there is no rule 'root'")
    _check_starts(rules, _empty_rules(rules))


def _may_be_empty(item: _Item, empty: set[str]) -> bool:
    return item.optional or item.size == 0 or item.refers_to in empty


def _empty_rules(rules: dict[str, _Alternatives]) -> set[str]:
    """The rules that match nothing at all among what they match: the least fixed point."""
    users: dict[str, list[str]] = {}
    for name, alternatives in rules.items():
        for item in (item for sequence in alternatives for item in sequence):
            users.setdefault(item.refers_to, []).append(name)
    empty: set[str] = set()
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name not in empty and any(all(_may_be_empty(i, empty) for i in sequence) for sequence in rules[name]):
            empty.add(name)
            pending += users.get(name, ())
    return empty


def _starts(alternatives: _Alternatives, empty: set[str]) -> Iterator[tuple[_Item, bool]]:
    """The items that may stand first, and whether each is the last of its sequence and not repeated."""
    for sequence in alternatives:
        for position, item in enumerate(sequence):
            if item.size > 0:
                yield item, position == len(sequence) - 1 and item.copies == 1
            if not _may_be_empty(item, empty):
                break


def _check_starts(rules: dict[str, _Alternatives], empty: set[str]) -> None:
    """Refuse rules that start with themselves, long chains of starts, and too many ways to go on."""
    starts = {name: list(_starts(alternatives, empty)) for name, alternatives in rules.items()}
    ways: dict[str, int] = {}
    lengths: dict[str, int] = {}
    open_: dict[str, Iterator[tuple[_Item, bool]]] = {}
    for first in rules:
        if first in ways:
            continue
        open_[first] = iter(starts[first])
        while open_:
            name = next(reversed(open_))
            for item, last in open_[name]:
                target = item.refers_to
                if target == name and last:
                    continue  # the same place again, which llama.cpp notices
                if target in open_:
                    raise InvalidRequest(f"the grammar is left-recursive: {_shown(target)} starts with itself")
                if target and target not in ways:
                    open_[target] = iter(starts[target])
                    break
            else:
                del open_[name]
                lengths[name] = 1 + max((lengths.get(item.refers_to, 0) for item, _ in starts[name]), default=0)
                ways[name] = min(sum(_ways(item, ways, empty) for item, _ in starts[name]) + 1, MAX_STARTS + 1)
                _check_start(name, ways[name], lengths[name])


def _ways(item: _Item, ways: dict[str, int], empty: set[str]) -> int:
    once = ways.get(item.refers_to, 0) + 1
    return once * item.copies if item.refers_to in empty else once


def _shown(name: str) -> str:
    return "a group" if name.startswith("(") else f"rule '{name}'"


def _check_start(name: str, ways: int, length: int) -> None:
    shown = _shown(name)
    if ways > MAX_STARTS:
        raise InvalidRequest(f"the grammar is too ambiguous: {shown} may go on in more than {MAX_STARTS} ways")
    if length > MAX_CHAIN:
        raise InvalidRequest(f"the grammar is too deep: {shown} starts a chain of more than {MAX_CHAIN} rules")
