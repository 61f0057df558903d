"""Which known word a misspelt one may mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CANDIDATES = 8


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` most likely means; None where none is near.

    Of those with about the same letters in about the same order, the one that takes the fewest slips of the hand.
    """
    candidates = difflib.get_close_matches(word, known, n=_CANDIDATES)
    return min(candidates, key=lambda other: slips(word, other), default=None)


def slips(word: str, other: str) -> int:
    """The letters to add, leave out, replace, or swap with their neighbour, to make one word of the other.

    The restricted Damerau-Levenshtein distance, also called optimal string alignment.
    """
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(word, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            least = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != wanted))
            if i > 1 and j > 1 and (letter, word[i - 2]) == (other[j - 2], wanted):
                least = min(least, rows[-2][j - 2] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]
