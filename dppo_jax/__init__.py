"""Group-based policy optimisation of language models, with unbiased pruning.

`import dppo_jax as dx; dx.algo.group_normalized(...)`: packages are imported
when they are first named.
"""

import importlib

__version__ = "0.2.0"  # setup.py reads it here

_PACKAGES = (
  "algo",
  "config",
  "data",
  "step",
  "methods",
  "models",
  "records",
  "metrics",
  "rewards",
  "rng",
  "rollout",
)


def __getattr__(name: str):
  if name not in _PACKAGES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
  return sorted(
    [*_PACKAGES, "__doc__", "__file__", "__name__", "__path__", "__version__"]
  )
