"""Execute examples/first_steps.py in an empty folder and store it as a notebook with its outputs: `make notebook`."""

from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from nbclient import NotebookClient

SCRIPT = Path(__file__).parents[1] / "examples" / "first_steps.py"


def execute_notebook(script: Path) -> nbformat.NotebookNode:
    """The cells of a script with their outputs, without what differs between machines and runs."""
    notebook = jupytext.read(script)
    with TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}}).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    return notebook


if __name__ == "__main__":
    nbformat.write(execute_notebook(SCRIPT), SCRIPT.with_suffix(".ipynb"))
