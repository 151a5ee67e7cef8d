"""What has to be settled before torch is loaded, and with it OpenMP."""

import os

# Torch's threads would spin at the end of every operation until the last of them is there. Where other processes want
# the processors, too, that one is not running, and the others keep it waiting: training took several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
