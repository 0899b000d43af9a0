"""Pages in a real browser: silent, offline, no wider than the screen, the numbers as planned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from pipeplan.compare.page import comparison_page
from pipeplan.report.page import Page, as_json, read_files, render, run_page
from pipeplan.testing.plans import random_plan, settle
from tests.samples import two_stages
from tests.unit.compare.test_page import COMPARISON
from tests.unit.report.test_page import page_of
from tests.unit.report.test_run_page import FLUSH, as_planned, write_files

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make tests installs it")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    " --disable-background-networking --disable-component-update"
)
NUMBERS = """() => Object.fromEntries([...document.querySelectorAll("table")].map(table => [
    table.dataset.table,
    [...table.querySelectorAll("tbody tr")].map(row => [...row.cells].map(
        cell => cell.dataset.value === undefined ? null : Number(cell.dataset.value)))]))"""
OVERFLOW = "() => document.documentElement.scrollWidth - window.innerWidth"
OUTSIDE = """() => [...document.querySelectorAll(".lane .block")].filter(block => {
    const room = block.parentElement.getBoundingClientRect(), own = block.getBoundingClientRect();
    return own.left < room.left - 1 || own.right > room.right + 1;
}).length"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One process for all pages."""
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield started
        started.close()


def numbers(page: Page) -> dict[str, list[list[float | None]]]:
    """What the page's JSON has; None for text."""
    tables = json.loads(as_json(page))["tables"]
    return {
        name: [[None if isinstance(each, str) else each for each in row.values()] for row in rows]
        for name, rows in tables.items()
    }


def check(browser: Browser, page: Page, file: Path) -> None:
    """`page` is right in both widths and colours; a bar that is tapped tells its times."""
    file.write_text(render(page), encoding="utf-8")
    for width, colours in ((390, "dark"), (1440, "light")):
        view: Any = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=colours
        )
        said: list[str] = []
        view.on("console", lambda message, said=said: said.append(message.text))
        view.on("pageerror", lambda error, said=said: said.append(str(error)))
        view.on("request", lambda request, said=said: said.append(request.url))
        view.goto(file.as_uri())
        assert view.evaluate(NUMBERS) == numbers(page)
        assert view.evaluate(OVERFLOW) <= 0
        assert view.evaluate(OUTSIDE) == 0
        bar = view.locator(".block").first
        bar.dispatch_event("click")
        assert view.locator(".told").first.inner_text() == bar.get_attribute("title")
        assert said == [file.as_uri()]
        view.close()


def test_pages_of_plans(browser: Browser, tmp_path: Path) -> None:
    """A period, and a whole step with long names."""
    long = settle(two_stages(semantics="flush"))
    chain = long.chain.model_copy(update={"name": "a-name-without-an-end" * 9})
    check(browser, page_of(long.model_copy(update={"chain": chain})), tmp_path / "step.html")
    check(browser, page_of(random_plan(5, gpus=4, layers=6)), tmp_path / "period.html")


def test_page_of_a_run(browser: Browser, tmp_path: Path) -> None:
    """Plan over run, delays, training."""
    folder = write_files(tmp_path / "run", FLUSH, as_planned(FLUSH, {"0F2": 7}))
    check(browser, run_page(read_files(str(folder))), tmp_path / "run.html")


def test_page_of_a_comparison(browser: Browser, tmp_path: Path) -> None:
    """Schedules, a missing one, periods over memory."""
    check(browser, comparison_page(COMPARISON), tmp_path / "comparison.html")
