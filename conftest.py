"""What pytest leaves out: modules that cannot be imported here, whose examples would be run."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/riskfield/kernels/gpu/*"]
