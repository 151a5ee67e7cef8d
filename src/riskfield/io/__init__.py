"""Files: models, evidence and answers."""

from riskfield.io.uai import UAIModel, read_evidence, read_uai, write_mar, write_pr

__all__ = [
    "UAIModel",
    "read_evidence",
    "read_uai",
    "write_mar",
    "write_pr",
]
