"""How much work something is, in numbers that are the same on every machine."""

from __future__ import annotations

import sys


def lines_run(function):
    """How many lines of Python `function()` runs: a loop over entries shows, vectorised work does not."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
