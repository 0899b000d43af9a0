"""Which of a run's checkpoints is the best by its validations, also behind a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.errors import InputError
from pipeplan.runtime.checkpoint import storage
from pipeplan.validation import LOSS, BestRule

FILE = "validation.jsonl"
"""A line per validation, in the folder of a run."""


@dataclass(slots=True)
class BestSoFar:
    """The best checkpoint of a run; every rank knows the same."""

    rule: BestRule
    value: float | None = None
    path: Path | None = None
    """The checkpoint; None: there is none yet."""

    def offer(self, values: Mapping[str, float], path: Path) -> bool:
        """Whether `values` are the best so far; then they are those of the checkpoint `path`."""
        value = values[self.rule.metric]
        if not math.isfinite(value):
            return False
        better = self.value is None or (
            value > self.value if self.rule.highest else value < self.value
        )
        if better:
            self.value, self.path = value, path
        return better

    def told(self) -> dict[str, Any]:
        """Metric, value and checkpoint, for run.json."""
        path = str(self.path) if self.path else None
        return {"metric": self.rule.metric, "value": self.value, "checkpoint": path}

    def recall(self, run: Path, until: int) -> None:
        """Take what earlier validations in the folder `run` say of checkpoints that are there.

        Args:
            run: the folder that is resumed from.
            until: steps done; what came behind is to be trained anew.

        Raises:
            InputError: if the file of validations is none.
        """
        for step, values in _told(run / FILE):
            path = storage.step_folder(run, step)
            if step <= until and self.rule.metric in values and storage.is_complete(path):
                self.offer(values, path)


def _told(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and numbers of each line; null where one was not finite."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    for line in lines:
        if not line.endswith("\n"):
            return  # a run was killed while it wrote
        try:
            told = json.loads(line)
            pairs = {LOSS: told["loss"], **told["metrics"]}.items()
            step = int(told["step"])
            values = {n: math.nan if value is None else float(value) for n, value in pairs}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InputError(
                f"{file}: got {line.strip()[:40]!r}, need the lines that a run wrote. Move the"
                " file away, and the best checkpoint is looked for anew."
            ) from None
        yield step, values
