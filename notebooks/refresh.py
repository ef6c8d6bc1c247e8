"""Makes each notebook from its .py, runs it, and saves it with its outputs.

pip install -e '.[notebooks]'
python notebooks/refresh.py [NAME ...]
"""

import argparse
import pathlib
import tempfile

import jupytext
import nbclient
import nbformat

# To publish the project, set these and run the command above. While they are
# empty, badges and install cells are left out: the notebooks run from a clone.
REPOSITORY = ""  # on GitHub, as OWNER/NAME, for badges
PACKAGE = (
  ""  # what pip installs: dppo_jax, the URL of a wheel, or git+https://...
)

FOLDER = pathlib.Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))

_BADGE = (
  "[![Open in Colab](https://colab.research.google.com/assets/"
  "colab-badge.svg)](https://colab.research.google.com/github/"
  "{repository}/blob/main/notebooks/{name}.ipynb)"
)
_INSTALL = """\
# Installs dppo_jax where it is missing, as on Colab: a minute or two.
import glob
import importlib.util
import shutil

if importlib.util.find_spec("dppo_jax") is None:
  has_tpu = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
  extra = "[cuda12]" if shutil.which("nvidia-smi") else ""
  requirement = "dppo_jax" + ("[tpu]" if has_tpu else extra) + "{source}"
  get_ipython().run_line_magic("pip", f"install -q '{{requirement}}'")"""


def make(name: str) -> nbformat.NotebookNode:
  """Returns the notebook of a .py, without outputs."""
  notebook = jupytext.read(FOLDER / f"{name}.py", fmt="py:percent")
  if PACKAGE:
    source = f" @ {PACKAGE}" if "/" in PACKAGE else ""
    cell = nbformat.v4.new_code_cell(_INSTALL.format(source=source))
    notebook.cells.insert(0, cell)
  if REPOSITORY:
    badge = _BADGE.format(repository=REPOSITORY, name=name)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(badge))
  for i, cell in enumerate(notebook.cells):
    cell.id, cell.metadata = f"cell-{i}", nbformat.NotebookNode()
  notebook.metadata = nbformat.from_dict(
    {
      "jupytext": {"formats": "ipynb,py:percent"},
      "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
      },
    }
  )
  notebook.nbformat, notebook.nbformat_minor = 4, 5
  return notebook


def run(notebook: nbformat.NotebookNode) -> None:
  """Executes every cell, in an empty directory; the first error is raised."""
  with tempfile.TemporaryDirectory() as folder:
    nbclient.NotebookClient(
      notebook,
      timeout=3600,
      kernel_name="python3",
      record_timing=False,
      coalesce_streams=True,
      resources={"metadata": {"path": folder}},
    ).execute()
  notebook.metadata.pop("language_info", None)  # names a version of Python
  for cell in notebook.cells:  # what libraries say of this machine
    if cell.cell_type == "code":
      cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
      for output in cell.outputs:
        if "text" in output:
          output.text = output.text.replace(str(pathlib.Path.home()), "~")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
  parser.add_argument("--to", type=pathlib.Path, default=FOLDER)
  flags = parser.parse_args()
  for name in flags.names or NAMES:
    notebook = make(name)
    run(notebook)
    nbformat.write(notebook, flags.to / f"{name}.ipynb")
    print(f"{name}: {len(notebook.cells)} cells")


if __name__ == "__main__":
  main()
