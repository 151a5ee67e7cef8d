"""Damage: bytes, text and trees of JSON."""

from __future__ import annotations

import json

VALUES = [None, True, -1, 0, 1, 2**40, 10**400, -0.5, float("nan"), float("inf"), "", "text", [], {}, [[[]]], {"a": 1}]


def mutated_bytes(content, rng):
    """A few bits flipped, bytes replaced, cut, repeated or moved."""
    changed = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        if not changed:
            return b""
        start = int(rng.integers(len(changed)))
        stop = min(len(changed), start + int(rng.choice([1, 4, 64, len(changed)])))
        action = rng.integers(5)
        if action == 0:
            changed[start] ^= 1 << int(rng.integers(8))
        elif action == 1:
            changed[start:stop] = rng.bytes(stop - start)
        elif action == 2:
            del changed[start:stop]
        elif action == 3:
            changed[start:start] = changed[start:stop]
        else:
            changed[start] = int(rng.choice([0, 1, 127, 128, 255]))
    return bytes(changed[: 4 * len(content) + 1000])


def mutated_words(text, rng, words):
    """A text in which some words are replaced, removed or repeated."""
    parts = text.split()
    for _ in range(rng.integers(1, 4)):
        if not parts:
            break
        place = int(rng.integers(len(parts)))
        action = rng.integers(3)
        if action == 0:
            parts[place] = str(rng.choice(words))
        elif action == 1:
            del parts[place]
        else:
            parts.insert(place, parts[int(rng.integers(len(parts)))])
    separators = rng.choice([" ", "\n", "\t", "\r\n"], p=[0.6, 0.3, 0.05, 0.05], size=len(parts))
    return "".join(part + separator for part, separator in zip(parts, separators, strict=True))


def mutated_tree(tree, rng):
    """A tree of dicts and lists in which one entry is replaced, removed, renamed, or nested deep."""
    tree = json.loads(json.dumps(tree))
    places = list(_places(tree))
    if not places:
        return tree
    parent, key = places[int(rng.integers(len(places)))]
    action = rng.integers(5)
    if action == 0:
        del parent[key]
    elif action == 1 and isinstance(parent, dict):
        parent[str(rng.choice(["other", "#tensor", "#object", "#array", "#pairs", "#class"]))] = parent.pop(key)
    elif action == 2:
        other, name = places[int(rng.integers(len(places)))]
        parent[key] = json.loads(json.dumps(other[name]))
    elif action == 3:
        for _ in range(int(rng.choice([1, 70, 300]))):
            parent[key] = [parent[key]]
    else:
        parent[key] = VALUES[int(rng.integers(len(VALUES)))]
    return tree


def _places(tree):
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in entries:
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)
