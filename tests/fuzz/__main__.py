"""The loop: see the package's docstring."""

from __future__ import annotations

import argparse
import faulthandler
import math
import resource
import secrets
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

import riskfield as rf
from fuzz import TARGETS, check

_SLOW = 300  # seconds; an example that takes longer shows where it is


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to look for failures")
    parser.add_argument("--target", choices=TARGETS, action="append", help="what to try; by default everything")
    parser.add_argument("--seed", type=int, help="check the example of this seed only")
    parser.add_argument("--examples", type=int, help="check so many, from seed 0 on, however long it takes")
    parser.add_argument("--failures", type=int, default=10, help="stop after so many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _limit_memory()
    warnings.simplefilter("error")
    targets = arguments.target or list(TARGETS)
    if arguments.seed is not None:
        return max(_report(target, arguments.seed) for target in targets)
    first = 0 if arguments.examples else secrets.randbelow(10**9)
    most = arguments.examples * len(targets) if arguments.examples else math.inf
    extent = f"{arguments.examples} examples" if arguments.examples else f"{arguments.minutes:g} minutes"
    print(f"riskfield {rf.__version__}, seeds from {first}, {extent}", flush=True)
    end = math.inf if arguments.examples else time.monotonic() + 60 * arguments.minutes
    spent, drawn, checked = ({target: 0 for target in targets} for _ in range(3))
    failures = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while time.monotonic() < end and sum(drawn.values()) < most and failures < arguments.failures:
            shares = drawn if arguments.examples else spent  # of the examples, or of the time
            target = min(targets, key=lambda name: shares[name])
            began = time.monotonic()
            faulthandler.dump_traceback_later(_SLOW, file=sys.__stderr__)
            failed, any_checks = _attempt(target, first + drawn[target])
            faulthandler.cancel_dump_traceback_later()
            seconds = time.monotonic() - began
            if seconds > _SLOW:
                seed = first + drawn[target]
                print(f"SLOW, {seconds:.0f} s: python -m fuzz --target {target} --seed {seed}", flush=True)
            spent[target] += seconds
            drawn[target] += 1
            checked[target] += any_checks
            failures += failed
    except KeyboardInterrupt:
        print("ended early")
    for target in targets:
        print(f"{target:<10} seeds {first} to {first + drawn[target] - 1}: {checked[target]} examples checked")
    print(f"{sum(checked.values())} examples, {failures} failures", flush=True)
    return min(failures, 1)


def _limit_memory(spare: int = 2**33) -> None:
    """Let whatever asks for gigabytes fail with a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _attempt(target: str, seed: int) -> tuple[bool, bool]:
    """Whether the example failed, and whether anything was checked."""
    try:
        return False, check(target, seed)
    except Exception:
        traceback.print_exc()
        print(f"FAILED: python -m fuzz --target {target} --seed {seed}\n", file=sys.stderr, flush=True)
        return True, True


def _report(target: str, seed: int) -> int:
    failed, any_checks = _attempt(target, seed)
    if not failed:
        print(f"{target}, seed {seed}: {'nothing wrong' if any_checks else 'nothing to check'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
