"""Train graphical models for the predictions you will actually make.

The names used most stand here. All public names are in the namespaces `graph`, `entropy`, `inference`, `adjoints`,
`losses`, `decoders`, `metrics`, `models`, `features`, `datasets`, `learning`, `optim`, `nn`, `io` and `errors`.

Importing this package is quick. Torch is loaded with the first name that is used, and scikit-learn with an estimator.
"""

import sys as _sys
import types as _types
import typing as _typing

__version__ = "0.2.0"

if _typing.TYPE_CHECKING:
    from riskfield._public import *  # noqa: F403
    from riskfield._public import __all__ as __all__
else:  # a type checker would take any name for one that is there
    _ESTIMATORS = {"CRF": "crf", "GridCRF": "grid_crf", "ImageCRF": "image_crf", "PerVariable": "per_variable"}

    class _Package(_types.ModuleType):
        """A package in which `infer` is the function, also after an import of the module `riskfield.infer`."""

        def __setattr__(self, name: str, value: object) -> None:
            if name != "infer" or not isinstance(value, _types.ModuleType):
                super().__setattr__(name, value)

    _sys.modules[__name__].__class__ = _Package

    def __getattr__(name: str) -> _typing.Any:
        """Load all public names when the first of them is asked for; a module and an estimator by itself."""
        from importlib import import_module
        from importlib.util import find_spec

        if name in _ESTIMATORS:
            return getattr(import_module(f"riskfield.estimators.{_ESTIMATORS[name]}"), name)
        if name == "__all__" or not name.startswith("_"):
            if name != "infer" and find_spec(f"riskfield.{name}") is not None:
                return import_module(f"riskfield.{name}")
            public = vars(import_module("riskfield._public"))
            globals().update({known: public[known] for known in ("__all__", *public["__all__"]) if known in public})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the names that are not loaded yet, too, so that shells complete them."""
        return sorted({*globals(), *__getattr__("__all__")})
