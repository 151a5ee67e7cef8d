"""What has to be settled before torch is loaded, and with it OpenMP."""

import os

# Torch's threads would spin at the end of every operation until the last of them is there. Where another program wants
# the processors, too, that one may be waiting for one. Beside a program that kept one of two busy, `make demo` was up
# to four times as slow so.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
