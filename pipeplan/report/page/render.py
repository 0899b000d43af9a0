"""A page as one HTML file that needs nothing beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeplan import __version__
from pipeplan.report.page.cells import shown_rows
from pipeplan.report.page.pictures import (
    BoxPicture,
    Chart,
    gantt,
    memory_charts,
    memory_legend,
    search_chart,
    shares,
)
from pipeplan.report.page.run_pictures import training_charts, validation_charts
from pipeplan.report.page.run_sections import TrainingSteps, Validations
from pipeplan.report.page.schedule_pictures import memory_chart, periods
from pipeplan.report.page.schedule_sections import PeriodOverMemory, Schedules
from pipeplan.report.page.sections import (
    IdleTime,
    MemoryOverTime,
    Page,
    SearchProgress,
    Section,
    Timeline,
)

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True, slots=True)
class Part:
    """A section and its pictures."""

    section: Section
    blocks: BoxPicture | None = None
    charts: tuple[Chart, ...] = ()
    kind: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    """Of all charts."""

    @property
    def pictured(self) -> bool:
        """Whether its tables stand behind a picture."""
        return self.blocks is not None or bool(self.charts)


def render(page: Page) -> str:
    """The text of the HTML file."""
    parts = [_part(section) for section in page.sections]
    template = _environment().get_template("page.html")
    return template.render(page=page, parts=parts, version=__version__) + "\n"


def _part(section: Section) -> Part:
    if isinstance(section, Timeline):
        return Part(section, gantt(section), kind="gantt")
    if isinstance(section, IdleTime):
        return Part(section, shares(section), kind="shares")
    if isinstance(section, MemoryOverTime):
        charts = memory_charts(section)
        return Part(section, charts=charts, legend=memory_legend(charts))
    if isinstance(section, TrainingSteps):
        return Part(section, charts=tuple(training_charts(section)))
    if isinstance(section, Validations):
        return Part(section, charts=tuple(validation_charts(section)))
    if isinstance(section, Schedules):
        return Part(section, periods(section), kind="shares")
    if isinstance(section, PeriodOverMemory):
        return Part(section, charts=(memory_chart(section),))
    if isinstance(section, SearchProgress):
        return Part(section, charts=(search_chart(section),))
    return Part(section)


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("pipeplan.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    made.globals["shown_rows"] = shown_rows
    return made
