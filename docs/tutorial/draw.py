"""Draw the figures of the tutorial anew, by running the code of its chapters: `python docs/tutorial/draw.py`."""

import os
import re
from pathlib import Path

import matplotlib
import torch

FOLDER = Path(__file__).parent
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

if __name__ == "__main__":
    matplotlib.use("Agg")
    chapters = {page: CODE.findall(page.read_text(encoding="utf-8")) for page in sorted(FOLDER.glob("*.md"))}
    (FOLDER / "figures").mkdir(exist_ok=True)
    os.chdir(FOLDER / "figures")
    for page, blocks in chapters.items():
        torch.manual_seed(0)
        exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__page__"})
