"""Whether a likelihood whose inference stops after a fixed number of sweeps can be believed."""

from __future__ import annotations

import math
from dataclasses import replace

from riskfield.infer import ExactOnForests, InferenceChoice
from riskfield.inference.exact import Exact
from riskfield.inference.request import Stop
from riskfield.learning.objective import Objective
from riskfield.learning.validation import evaluating


def overstatement(objective: Objective) -> str | None:
    """How far twice as many sweeps contradict the risk at the present parameters; None if they do not.

    A truncated log-partition value (Domke 2013, section 7.3) can be lowered by parameters for which inference is not
    done yet, in place of parameters that fit. Where truncation does no harm, more sweeps change next to nothing.
    """
    inference = objective.inference
    truncated = inference.loopy if isinstance(inference, ExactOnForests) else inference
    if objective.loss.lower_bound == -math.inf or truncated is None or truncated.stop.tol is not None:
        return None
    if isinstance(truncated.algorithm, Exact):
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
    # A tenth, and a hundredth of a nat per variable, are beyond what matters.
    if found - claimed <= 0.1 * abs(claimed) + 0.01 * objective.unit:
        return None
    return f"the risk is {claimed:.3g} by {sweeps} sweeps of inference, and {found:.3g} by {2 * sweeps}"
