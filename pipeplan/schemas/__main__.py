"""`python -m pipeplan.schemas`: write the JSON Schemas anew after a change of a data type."""

from __future__ import annotations

from pipeplan.schemas import write

if __name__ == "__main__":
    for path in write():
        print(path)
