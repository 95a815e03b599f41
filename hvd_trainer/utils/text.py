"""Texts for people."""

from __future__ import annotations


def plural(count: float, word: str, words: str | None = None) -> str:
    """`1 rank`, `2 ranks`."""
    return (
        f"{f'{count:,}' if isinstance(count, int) else f'{count:g}'} {word if count == 1 else words or word + 's'}"
    )
