"""Run the programs of `examples/` that train layers at full length, and record what they print.

    python benchmarks/programs.py

It seeds torch before each program, so that the results can be repeated, and writes `results/benchmarks/programs.md`.
"""

from __future__ import annotations

import runpy
import time
from pathlib import Path

import torch

import riskfield as rf
from timing import about, keep, write_page

ROOT = Path(__file__).parents[1]


def main() -> None:
    torch.set_num_threads(1)
    rf.set_num_threads(1)
    rows = []
    for name, measures in (
        ("bilstm_crf", ["right tags"]),
        ("unet_crf", ["wrong pixels", "wrong pixels, by a threshold"]),
    ):
        torch.manual_seed(0)
        began = time.process_time()
        found = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](quick=False)
        seconds, values = time.process_time() - began, found if isinstance(found, tuple) else (found,)
        rows.append({"program": name, "seconds": seconds, **dict(zip(measures, values, strict=True))})
        print(rows[-1], flush=True)
    facts = about()
    path = ROOT / "results" / "benchmarks" / "programs"
    keep(path, {"about": facts, "rows": rows})
    text = "| program | result | seconds of one core |\n|---|---|---|\n"
    for row in rows:
        results = ", ".join(f"{k} {v:.1%}" for k, v in row.items() if k not in ("program", "seconds"))
        text += f"| examples/{row['program']}.py | {results} | {row['seconds']:.0f} |\n"
    write_page(path, "Programs at full length", facts, text)


if __name__ == "__main__":
    main()
