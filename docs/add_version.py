"""Add the built pages of one version to a hosted site, which has one folder per version.

python docs/add_version.py docs/_build/html SITE 0.2.0

The folder SITE gets the pages as SITE/0.2.0, the list of versions (versions.json), and an index page that leads to the
newest version.
"""

import json
import re
import shutil
import sys
from pathlib import Path

_INDEX = (
    '<!doctype html><meta charset="utf-8"><title>riskfield</title>'
    '<meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">riskfield {0}</a>\n'
)


def add_version(built: Path, site: Path, version: str) -> list[str]:
    """Return the names of all versions of the site, newest first."""
    if not re.fullmatch(r"\d+(\.\d+)*", version):
        raise SystemExit(f"the version must be numbers with dots, such as 0.2.0. Got {version!r}.")
    if not (built / "index.html").is_file():
        raise SystemExit(f"{built} has no index.html: build the pages first, with `make docs`.")
    shutil.rmtree(site / version, ignore_errors=True)
    shutil.copytree(built, site / version)
    versions = [path.name for path in site.iterdir() if re.fullmatch(r"\d+(\.\d+)*", path.name)]
    versions.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    (site / "versions.json").write_text(json.dumps(versions) + "\n", encoding="utf-8")
    (site / "index.html").write_text(_INDEX.format(versions[0]), encoding="utf-8")
    (site / ".nojekyll").touch()  # GitHub Pages leaves out folders such as _static otherwise
    return versions


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    print(*add_version(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
