"""`forebay bench report` on result files of several clients: the structure of the page, and a browser that opens it.

The files in runs/ are made up. forebay.jsonl has two runs. vllm.json and bench_serving.jsonl have the keys of those
clients. hostile.jsonl tries to break out of the page. minimal.jsonl has a single number.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.binary import binary

BINARY = binary()
RUNS = Path(__file__).parent / "runs"
ALL = ["forebay.jsonl", "vllm.json", "bench_serving.jsonl"]
VOID = {"meta", "link", "br"}
# Elements that load something or lead away from the page.
LOADING_TAGS = {"script", "iframe", "img", "image", "object", "embed", "audio", "video", "use", "a", "form", "base"}
LOADING_ATTRIBUTES = {"src", "srcset", "xlink:href", "action", "poster", "data"}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Element:
    """An element of a page: its tag, attributes, and all text inside it."""

    tag: str
    attributes: dict[str, str]
    parents: list[str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """A page as a list of its elements in order. Every opened element must be closed."""

    elements: list[Element] = field(default_factory=list)
    open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        parents = [element.tag for element in self.open]
        element = Element(tag, {name: value or "" for name, value in attrs}, parents)
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open[-1].tag == tag, f"{tag} closes {self.open[-1].tag}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """The elements with this tag and these attributes."""
        wanted = attributes.items()
        return [element for element in self.elements if element.tag == tag and wanted <= element.attributes.items()]

    def sections(self) -> list[str]:
        return [element.attributes["id"] for element in self.all("section")]

    def charts(self) -> list[Element]:
        return [element for element in self.all("svg") if element.attributes.get("role") == "img"]


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert not page.open
    return page


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BINARY, "bench", "report", *arguments], capture_output=True, text=True, timeout=60)


def report(tmp_path: Path, *names: str, title: str | None = None) -> Path:
    """The page about files of runs/."""
    out = tmp_path / "out.html"
    done = run(*(RUNS / name for name in names), "-o", out, *(["--title", title] if title else []))
    assert done.returncode == 0, done.stderr
    return out


def read(out: Path) -> Page:
    return parse(out.read_text(encoding="utf-8"))


def loading(page: Page) -> list[Element]:
    """Elements that load something from outside or run a script."""
    return [
        element
        for element in page.elements
        if element.tag in LOADING_TAGS
        or LOADING_ATTRIBUTES & element.attributes.keys()
        or any(name.startswith("on") for name in element.attributes)
        or not re.fullmatch("|data:,", element.attributes.get("href", ""))
    ]


def test_the_page_compares_all_runs_of_all_files(tmp_path: Path) -> None:
    page = read(report(tmp_path, *ALL, title="Before & after"))
    assert [heading.text for heading in page.all("h1")] == ["Before & after"]
    assert page.sections() == ["care", "settings", "comparison", "distributions", "timelines", "cpu", "errors"]
    labels = [element.text for element in page.all("span", **{"class": "label"}) if "header" in element.parents]
    assert labels == ["lookahead 0", "lookahead 1", "vllm.json", "bench_serving.jsonl"]
    # Charts of five latencies, throughput, concurrency, sent and finished requests, and CPU.
    assert len(page.charts()) == 10
    assert all(chart.attributes["aria-label"] for chart in page.charts())
    assert not loading(page)


def test_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    page = read(report(tmp_path, *ALL))
    first, second = map(json.loads, (RUNS / "forebay.jsonl").read_text().splitlines())
    exact = {element.attributes.get("title") for element in page.all("span", **{"class": "value"})}
    for result in (first, second):
        for key in ("output_throughput", "p99_ttft_ms", "median_ttft_intended_ms", "max_itl_ms"):
            assert str(result[key]) in exact
    ratio = second["output_throughput"] / first["output_throughput"]
    better = {element.text for element in page.all("span", **{"class": "ratio better"})}
    assert f"{ratio:.2f}× ▲ better" in better


def test_rows_are_in_the_order_of_bench_serving(tmp_path: Path) -> None:
    page = read(report(tmp_path, "forebay.jsonl"))
    groups = [element.text for element in page.all("th", scope="rowgroup")]
    assert groups == [
        "Work and throughput",
        "End-to-end latency",
        "Time to first token, from the send",
        "Time to first token, from the intended arrival",
        "Time per output token, after the first",
        "Inter-token latency",
        "Cost and load generator",
    ]
    rows = [element.text for element in page.all("th", scope="row")]
    order = ["Successful requests", "Benchmark duration (s)", "Total generated tokens", "Request throughput (req/s)"]
    assert sorted(order, key=rows.index) == order


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    assert read(report(tmp_path, "minimal.jsonl")).sections() == ["care", "settings", "comparison"]
    assert "distributions" not in read(report(tmp_path, "bench_serving.jsonl")).sections()


def test_details_of_other_clients_make_charts(tmp_path: Path) -> None:
    page = read(report(tmp_path, "vllm.json"))
    # Charts of all latencies except that from the intended arrival, which the file lacks, and of the timeline. No CPU.
    assert len(page.charts()) == 8
    assert "Internal Server Error" in next(iter(page.all("section", id="errors"))).text


def test_text_of_files_stays_text(tmp_path: Path) -> None:
    out = report(tmp_path, "hostile.jsonl", title="</title><script>alert(0)</script>")
    page = read(out)
    assert not loading(page)
    assert "</title><script>alert('label')</script>" in page.all("header")[0].text
    assert "<img src=x onerror=alert(1)>" in page.all("section", id="errors")[0].text
    assert (
        "default-src 'none'" in page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0].attributes["content"]
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', "not json", '{"output_throughput": "fast"}'])
def test_what_is_no_result_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text(content)
    done = run(RUNS / "forebay.jsonl", file, "-o", tmp_path / "out.html")
    assert done.returncode != 0
    assert "broken.jsonl" in done.stderr
    assert not (tmp_path / "out.html").exists()


def browse(profile: Path, *arguments: str) -> str:
    """The output of a headless browser."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    quiet = ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    assert BROWSER
    command = [BROWSER, *flags, *quiet, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    out = report(tmp_path, *ALL)
    page = parse(browse(tmp_path / "profile", "--dump-dom", out.as_uri()))
    assert len(page.charts()) == 10
    # If the browser had repaired the page, elements would be in other places or closed.
    assert [element.tag for element in page.elements] == [element.tag for element in read(out).elements]
    picture = tmp_path / "page.png"
    browse(tmp_path / "profile", "--window-size=400,6000", f"--screenshot={picture}", out.as_uri())
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_runs_nothing_of_a_hostile_file(tmp_path: Path) -> None:
    out = report(tmp_path, "hostile.jsonl")
    assert not loading(parse(browse(tmp_path / "profile", "--dump-dom", out.as_uri())))
