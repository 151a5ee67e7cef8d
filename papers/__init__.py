"""Studies of the papers that riskfield implements: `python -m papers --help`.

They use public names of riskfield only, and are no part of the installed package.
"""
