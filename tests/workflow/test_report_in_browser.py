"""The HTML report as its reader sees it: in a real browser, made from the published run on an H200.

And once from a whole run of this machine, with every page that there is: a decode sweep, the profile, and
several environments.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from selenium.common.exceptions import ElementClickInterceptedException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from harness.environment import environment_key
from tests.workflow.browser import chromium, console_errors, requested, require_chromium
from tests.workflow.checkout import ROOT, Checkout, small_config
from tests.workflow.test_figures import HOSTILE, fail
from workflow.config import load_config
from workflow.goals import goal_rows
from workflow.pages import latency_page

PUBLISHED = ROOT / "docs" / "results" / "h200" / "default"
SECONDS_TO_APPEAR = 20
SECONDS_TO_ANSWER = 2  # to a click


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report that the workflow's own rules make from the published tables."""
    require_chromium()
    checkout = Checkout.make(tmp_path_factory.mktemp("report"))
    benchmark = pd.read_csv(PUBLISHED / "benchmark.csv")
    config = small_config(**dict.fromkeys(benchmark["implementation"].unique(), "naive"))
    (sweep,) = config["sweeps"].values()
    config["sweeps"] = {name: dict(sweep) for name in benchmark["sweep"].unique()}
    config["goals"] = {
        "beats_naive": {"implementation": "triton", "against": ["naive", "sdpa"], "speedup_each": 1.0}
    }
    checkout.configure(json.loads(json.dumps(config)))
    results = checkout.folder / "results"
    environment = results / environment_key("cpu")
    environment.mkdir(parents=True)
    shutil.copy(PUBLISHED / "environment.json", environment)
    for table in PUBLISHED.glob("*.csv"):
        shutil.copy(table, results)
    goals = load_config(config, checkout.folder / "kernels")["goals"]
    rows = benchmark.fillna({"marks": ""}).to_dict("records")
    sizes = {(row["sweep"], row["seq_len"]): row["working_set_bytes"] for row in rows}
    pd.DataFrame(goal_rows(goals, rows, [], sizes)).to_csv(results / "goals.csv", index=False)
    made = checkout.snakemake("report", "--allowed-rules", "figures", "render_report", "report")
    assert made.returncode == 0, made.stdout
    return checkout.folder / "report" / "report.html"


@pytest.fixture(scope="module")
def whole_report(tmp_path_factory):
    """The report of a run of this machine with every page that can be asked for."""
    require_chromium()
    checkout = Checkout.make(tmp_path_factory.mktemp("whole"))
    config = small_config(sdpa="sdpa", triton="triton_flash", decode="triton_decode")
    tokens = dict.fromkeys(("batch", "heads", "kv_heads"), 1) | {"workload": "decode", "head_dim": 16}
    config["sweeps"]["tokens"] = tokens | {"dtype": "bf16", "seq_lens": {"cuda": [64], "cpu": [64]}}
    config["sweeps"]["tokens"]["measure"] = ["timing", "memory"]
    config["collect"] = ["results", "elsewhere/results"]
    config["static_profile"] = {"targets": ["sm_80"], "candidates": 1}
    checkout.configure(config)
    measured = checkout.snakemake("--cores", "2")
    assert measured.returncode == 0, measured.stdout
    # The same records as those of another machine, whose environment differs in its key alone.
    here = checkout.folder / "results" / environment_key("cpu")
    key = here.name.replace("-threads", "-threads-of-another-machine")
    there = checkout.folder / "elsewhere" / "results" / key
    shutil.copytree(here, there)
    for path in there.rglob("*.json"):
        path.write_text(path.read_text().replace(here.name, key))
    for target in ("profile", "static_profile", "collect", "report"):
        made = checkout.snakemake("--cores", "2", target)
        assert made.returncode == 0, made.stdout
    return checkout.folder / "report" / "report.html"


@pytest.fixture(scope="module")
def browser():
    with chromium() as window:
        yield window


@pytest.fixture
def window(browser, report):
    with opened(browser, report):
        yield browser


@pytest.fixture
def whole_window(browser, whole_report):
    with opened(browser, whole_report):
        yield browser


@contextmanager
def opened(browser, report):
    """The report, opened; afterwards the console must have been without an error and nothing asked for."""
    browser.get(report.as_uri())
    console_errors(browser)
    requested(browser)
    yield
    assert console_errors(browser) == []
    assert requested(browser) <= {"data:", report.as_uri()}


def wait(window, condition: Callable[[], object]) -> object:
    moving = (StaleElementReferenceException, ElementClickInterceptedException)
    waiting = WebDriverWait(window, SECONDS_TO_APPEAR, poll_frequency=0.05, ignored_exceptions=moving)
    return waiting.until(lambda _: condition())


def press(window, find: Callable[[], WebElement], appears: Callable[[], object] = lambda: True) -> object:
    """Click what is found, as soon as it has stopped moving and nothing covers it, until something appears.

    A page that is still being set up swallows a click: then it is clicked again.
    """
    pressed_at = -math.inf

    def pressed() -> object:
        nonlocal pressed_at
        if pressed_at > -math.inf and (found := appears()):
            return found
        if time.monotonic() > pressed_at + SECONDS_TO_ANSWER:
            find().click()
            pressed_at = time.monotonic()
            return appears()
        return None

    return wait(window, pressed)


def open_category(window, category: str) -> None:
    link = f"//a[span[.='{category}']]"
    press(window, lambda: window.find_element(By.XPATH, link), lambda: entries(window))


def entries(window) -> list[WebElement]:
    return window.find_elements(By.XPATH, "//nav//tbody/tr")


def switches(window) -> list[str]:
    """The values of the switch above the entries, where the category has one."""
    return [label.text for label in window.find_elements(By.CSS_SELECTOR, "nav fieldset label")]


def shown_now(window) -> WebElement | None:
    """The figure, or the frame of the table, that is shown beside the entries."""
    found = window.find_elements(By.CSS_SELECTOR, "div.h-screen.overflow-auto img, iframe")
    return found[-1] if found else None


def show(window, number: int) -> WebElement:
    """Press the eye of an entry; the figure or the frame of the table that appears."""
    before = shown_now(window)
    source = before.get_attribute("src") if before else None

    def appeared() -> WebElement | None:
        shown = shown_now(window)
        return shown if shown and shown.get_attribute("src") != source else None

    return press(window, lambda: entries(window)[number].find_elements(By.TAG_NAME, "a")[0], appeared)


def test_every_category_figure_and_table_is_found_and_shown_with_its_caption(window):
    look_at_everything(window)


def test_decode_the_profile_and_several_environments_are_found_and_shown(whole_window):
    seen = look_at_everything(whole_window)
    stems = {Path(path).stem for path in seen}
    assert {"tokens_latency", "tokens_memory", "tokens_roofline", "limits", "static_profile"} <= stems
    assert {
        f"report/collect/{sweep}.{kind}" for sweep in ("tiny", "tokens") for kind in ("svg", "html")
    } <= seen
    categories = set(whole_window.execute_script("return Object.keys(categories)"))
    assert {"Correctness", "Latency", "Memory", "Profile", "Several environments"} <= categories


def look_at_everything(window) -> set[str]:
    """Open every entry of every category; the paths of all that was seen, which is all that there is."""
    results = window.execute_script("return results")
    seen = set()
    for category in window.execute_script("return Object.keys(categories)"):
        open_category(window, category)
        for switch in switches(window) or [""]:
            if switch:
                label = f"//nav//fieldset//label[.='{switch}']"
                press(window, lambda label=label: window.find_element(By.XPATH, label))
            for number in range(len(entries(window))):
                labels = f"{entries(window)[number].text} {switch}"
                shown = show(window, number)
                source = shown.get_attribute("src")
                (path,) = [path for path, result in results.items() if result["data_uri"] == source]
                seen.add(path)
                assert all(label in labels for label in results[path]["labels"].values())
                look_at(window, shown)
        window.get(window.current_url.partition("#")[0])
    assert seen == set(results)
    return seen


def look_at(window, shown: WebElement) -> None:
    """A figure is drawn and can be seen from its upper left corner on; a table has rows."""
    if shown.tag_name == "img":
        assert wait(window, lambda: shown.get_property("naturalWidth")) > 300
        corner = window.execute_script("return arguments[0].getBoundingClientRect().toJSON()", shown)
        menu = window.find_element(By.TAG_NAME, "nav").rect
        assert corner["top"] >= 0
        assert corner["left"] >= menu["x"] + menu["width"]
    else:
        window.switch_to.frame(shown)
        assert wait(window, lambda: window.find_elements(By.CSS_SELECTOR, "tbody tr"))
        window.switch_to.default_content()


def test_every_caption_is_shown_and_its_numbers_are_filled_in(window):
    timing = small_config(naive="naive")["timing"]
    seen = []
    for category in window.execute_script("return Object.keys(categories)"):
        open_category(window, category)
        for number in range(len(entries(window))):
            press(
                window,
                lambda n=number: entries(window)[n].find_elements(By.TAG_NAME, "a")[1],
                lambda: window.find_elements(By.CSS_SELECTOR, "nav .prose"),
            )
            caption = window.find_element(By.CSS_SELECTOR, "nav .prose").text
            assert len(caption) > 100
            assert "{" not in caption
            seen.append(caption)
            back = f"//nav//a[normalize-space(.)='{category}']"
            press(window, lambda back=back: window.find_element(By.XPATH, back), lambda: entries(window))
        window.get(window.current_url.partition("#")[0])
    [latency] = {caption for caption in seen if caption.startswith("Latency of one call")}
    counts = f"of {timing['processes']['cpu']} processes, each of {timing['samples']} samples"
    assert counts in " ".join(latency.split())


def test_the_first_page_leads_to_every_category(window):
    page = window.find_element(By.TAG_NAME, "body").text
    assert "Attention kernels: are they right" in page
    for category in window.execute_script("return Object.keys(categories)"):
        link = f"//div[contains(@class, 'prose')]//a[.='{category}']"
        assert press(window, lambda link=link: window.find_element(By.XPATH, link), lambda: entries(window))
        window.get(window.current_url.partition("#")[0])


def test_the_runtimes_are_drawn_and_the_embedded_packages_named(window):
    assert press(
        window,
        lambda: window.find_element(By.XPATH, "//a[span[.='Statistics']]"),
        lambda: window.find_elements(By.CSS_SELECTOR, "canvas, svg.marks"),
    )
    assert press(
        window,
        lambda: window.find_element(By.XPATH, "//a[span[.='About']]"),
        lambda: "snakemake " in window.find_element(By.TAG_NAME, "nav").text,
    )


class Table:
    """The table of a page, as the page shows it."""

    def __init__(self, window) -> None:
        self.window = window

    def headers(self) -> list[str]:
        return [
            button.text.split("\n")[0] for button in self.window.find_elements(By.CSS_SELECTOR, "th button")
        ]

    def column(self, header: str) -> list[str]:
        script = (
            "return [...document.querySelector('tbody').rows].filter(row => !row.hidden)"
            ".map(row => row.cells[arguments[0]].textContent)"
        )
        return self.window.execute_script(script, self.headers().index(header))

    def press(self, header: str) -> str:
        head = self.window.find_elements(By.TAG_NAME, "th")[self.headers().index(header)]
        head.find_element(By.TAG_NAME, "button").click()
        return head.get_attribute("aria-sort")

    def keep(self, header: str, value: str) -> None:
        head = self.window.find_elements(By.TAG_NAME, "th")[self.headers().index(header)]
        Select(head.find_element(By.TAG_NAME, "select")).select_by_visible_text(value)

    def type(self, words: str) -> None:
        box = self.window.find_element(By.CSS_SELECTOR, "input[type=search]")
        box.clear()
        box.send_keys(words)

    def count(self) -> str:
        return self.window.find_element(By.CSS_SELECTOR, "input + p").text


@pytest.fixture
def cells(window):
    """The table of every cell of the grid, inside the report."""
    open_category(window, "Correctness")
    number = next(i for i, entry in enumerate(entries(window)) if "every cell" in entry.text)
    window.switch_to.frame(show(window, number))
    wait(window, lambda: window.find_elements(By.CSS_SELECTOR, "th button"))
    yield Table(window)
    window.switch_to.default_content()


def test_a_table_in_the_report_sorts_by_a_press_on_a_header(cells):
    before = cells.column("largest error")
    numbers = sorted(float(text) for text in before)
    assert numbers != [float(text) for text in before]
    assert cells.press("largest error") == "ascending"
    assert [float(text) for text in cells.column("largest error")] == numbers
    assert cells.press("largest error") == "descending"
    assert [float(text) for text in cells.column("largest error")] == numbers[::-1]
    assert cells.press("largest error") == "none"
    assert cells.column("largest error") == before
    assert cells.press("in row") == "ascending"
    rows = cells.column("in row")
    filled = [int(text) for text in rows if text]
    assert 0 < len(filled) < len(rows)
    assert rows[: len(filled)] == [str(row) for row in sorted(filled)]  # cells without a number come last


def test_a_table_in_the_report_is_filtered_by_value_and_by_words(cells):
    grid = pd.read_csv(PUBLISHED / "correctness.csv")
    assert cells.count() == f"{len(grid)} of {len(grid)} rows"
    cells.keep("implementation", "triton")
    cells.keep("head_dim", "64")
    kept = grid[(grid["implementation"] == "triton") & (grid["head_dim"] == 64)]
    assert cells.count() == f"{len(kept)} of {len(grid)} rows"
    assert set(cells.column("implementation")) == {"triton"}
    assert set(cells.column("head_dim")) == {"64"}
    cells.type("BF16 causal")
    kept = kept[(kept["dtype"] == "bf16") & kept["causal"]]
    assert 0 < len(kept) == len(cells.column("status"))
    cells.type("no such words")
    assert cells.column("status") == []
    cells.type("")
    cells.keep("head_dim", "all")
    cells.keep("implementation", "all")
    assert len(cells.column("status")) == len(grid)


def test_text_from_a_kernel_is_no_script_of_the_page(browser, tmp_path):
    benchmark = pd.read_csv(PUBLISHED / "benchmark.csv")
    benchmark = fail(benchmark, benchmark["implementation"] == "sdpa", "error", f"{HOSTILE}</script><b>x</b>")
    page = tmp_path / "page.html"
    page.write_text(latency_page(benchmark[benchmark["sweep"] == benchmark["sweep"].iloc[0]]))
    browser.get(page.as_uri())
    table = Table(browser)
    table.type("<script>alert(1)</script>")
    assert set(table.column("implementation")) == {"sdpa"}
    table.type("")
    table.press("latency (ms)")
    assert table.column("latency (ms)")[-1] == ""
    assert browser.find_elements(By.TAG_NAME, "b") == []
    assert console_errors(browser) == []
