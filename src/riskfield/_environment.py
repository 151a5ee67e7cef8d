"""What has to be settled before torch is loaded, and with it OpenMP."""

import os

# Torch's threads would spin at the end of every operation until the last of them is there. Where another program wants
# the processors, too, that last one may itself be waiting for one. What it costs is in docs/performance.md.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
