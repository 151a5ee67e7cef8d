"""Files and models of other programs: UAI, pgmpy."""

from riskfield.io.pgmpy import PgmpyModel, from_pgmpy, to_pgmpy
from riskfield.io.uai import UAIModel, read_evidence, read_uai, write_mar, write_pr

__all__ = [
    "PgmpyModel",
    "UAIModel",
    "from_pgmpy",
    "read_evidence",
    "read_uai",
    "to_pgmpy",
    "write_mar",
    "write_pr",
]
