"""Names of riskfield that the studies need and that are not public.

This is the only module of `papers` that may import from inside the package. When a name gets a public home, its users
import it from there and its line here goes.
"""

from riskfield.report.colours import class_colours

__all__ = ["class_colours"]
