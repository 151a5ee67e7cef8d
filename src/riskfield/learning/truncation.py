"""A check whether a truncated likelihood, with a fixed number of sweeps, is reliable."""

from __future__ import annotations

import math
from dataclasses import replace

from riskfield.infer import ExactOnForests, InferenceChoice
from riskfield.inference.stop import Stop
from riskfield.learning.objective import Objective
from riskfield.learning.validation import evaluating


def overstatement(objective: Objective) -> str | None:
    """Compare the risk at the present parameters with that of twice as many sweeps. None if they agree.

    A truncated log-partition value (Domke 2013, section 7.3) can decrease because inference has not converged, instead
    of because the parameters fit better. If truncation is harmless, more sweeps change the risk very little.
    """
    inference = objective.inference
    truncated = inference.loopy if isinstance(inference, ExactOnForests) else inference
    if objective.loss.lower_bound == -math.inf or truncated is None or truncated.stop.tol is not None:
        return None
    if not truncated.algorithm.iterative:
        return None
    sweeps = truncated.stop.sweeps
    longer = replace(truncated, stop=Stop(2 * sweeps, tol=None))
    other: InferenceChoice = longer
    if isinstance(inference, ExactOnForests):
        if all(block.graph.is_forest for block in objective.data):
            return None
        other = ExactOnForests(longer)
    with evaluating(objective.model):
        claimed, found = objective.risk(), objective.with_inference(other).risk()
    # Differences below a tenth of the risk plus a hundredth of a nat per variable do not matter.
    if found - claimed <= 0.1 * abs(claimed) + 0.01 * objective.unit:
        return None
    return f"the risk is {claimed:.3g} with {sweeps} sweeps of inference, but {found:.3g} with {2 * sweeps}"
