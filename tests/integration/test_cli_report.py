"""``raystow report``: the contents of the page, and its rendering in a browser."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chromium import chromium
from helpers.local_cluster import LocalCluster

from integration.cli_runner import run, run_json
from raystow.storage.format import keys
from raystow.storage.format.version_record import RestoreInfo
from raystow.storage.repository import create_repository, open_repository
from raystow.storage.runtime.clock import SYSTEM

PRICES = ("--store-price", 0.023, "--gpu-price", 4.4, "--gpus", 8)
PLOTS = ("bytes", "ratio", "stall", "interval", "restores", "cost", "metric-0")
STALLS = (0.03, 0.05, None, 1.5)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four versions: the third has no stall, and the record of the last has a restore of the second."""
    folder = tmp_path_factory.mktemp("runs") / "llama"
    generator = torch.Generator().manual_seed(0)
    with LocalCluster(str(folder)) as cluster:
        for number, stall in enumerate(STALLS, 1):
            if number == 4:
                read = {"memory": 3 << 20, "peer": 2 << 20, "store": 1 << 20}
                cluster.coordinator.restored([RestoreInfo(2, 200, SYSTEM.now(), 8, 2.5, read)])
            state = {"w": torch.randn(number * 10_000, generator=generator), "zeros": torch.zeros(10_000)}
            cluster.save(state, step=100 * number, stall=stall, metrics={"</script>": 1 / number})
    repository = open_repository(str(folder))
    repository.pin(repository.versions()[1], "<b>best")
    return folder


@pytest.fixture(scope="module")
def whole(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of that run with all plots."""
    path = tmp_path_factory.mktemp("page") / "r.html"
    page_of(run_dir, path, *PRICES)
    return path


def page_of(folder: Path, to: Path, *words: object) -> str:
    result = run("report", folder, "-o", to, *words)
    assert result.exit_code == 0, result.output
    return to.read_text()


def cells(page: str, table: str) -> list[list[str]]:
    """Return the rows of a table of the page as text."""
    body = page[page.index(f'aria-labelledby="{table}"') :]
    body = body[body.index("<tbody>") : body.index("</tbody>")]
    return [
        [html.unescape(re.sub("<[^>]*>", "", cell)).strip() for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)]
        for row in body.split("<tr>")[1:]
    ]


def test_the_figures_equal_those_of_the_repository(run_dir: Path, tmp_path: Path) -> None:
    facts = run_json("report", run_dir, "-o", tmp_path / "r.html", *PRICES)
    versions = open_repository(str(run_dir)).versions()
    assert [(v["id"], v["step"], v["raw"], v["stored"]) for v in facts["versions"]] == [
        (v.id, v.step, v.raw, v.bytes) for v in versions
    ]
    assert [v["stall"] for v in facts["versions"]] == list(STALLS)
    assert [v["pins"] for v in facts["versions"]] == [[], ["<b>best"], [], []]
    (restore,) = facts["restores"]
    assert (restore["version"], restore["ranks"], restore["read"]["peer"]) == (2, 8, 2 << 20)
    assert facts["stored"] == sum(v.bytes for v in versions)
    last = facts["versions"][-1]
    assert last["dollars"]["stall"] == pytest.approx(1.5 / 3600 * 8 * 4.4)
    months = (facts["made"] - last["created"]) / (30 * 86400)
    assert last["dollars"]["store"] == pytest.approx(last["stored"] / 1e9 * 0.023 * months)
    assert last["dollars"]["raw_store"] == pytest.approx(last["raw"] / 1e9 * 0.023 * months)


def test_every_plot_has_a_description_and_a_table(whole: Path) -> None:
    page = whole.read_text()
    for name in PLOTS:
        assert re.search(f'<div id="plot-{name}" class="plot" role="img" aria-label="[^"]{{20,}}"', page)
    assert "3 versions, steps 100 to 400: stall 30 ms to 1.5 s, median 50 ms." in page
    assert "Unknown for 1 of 4 versions. The axis is logarithmic" in page
    assert "and a failure every" in page
    assert page.count("</script>") == page.count("<script")
    rows = cells(page, "versions")
    assert [row[:2] + row[7:8] for row in rows] == [
        ["1", "100", "30 ms"],
        ["2", "200", "50 ms"],
        ["3", "300", "-"],
        ["4", "400", "1.5 s"],
    ]
    assert rows[1][-1] == "<b>best"
    assert [row[2:] for row in cells(page, "restores")] == [["2", "200", "8", "2.5 s", "3.00 MiB", "2.00 MiB", "1.00 MiB", "0 B"]]
    assert "&lt;b&gt;best" in page
    assert "<b>best" not in page


def test_without_prices_the_page_names_the_price_options(run_dir: Path, tmp_path: Path) -> None:
    page = page_of(run_dir, tmp_path / "r.html")
    assert "No prices were given: --store-price" in page
    assert 'id="plot-cost"' not in page, "no panel is empty"
    assert run("report", run_dir, "--gpus", 8, "-o", tmp_path / "no.html").exit_code == 2
    assert not (tmp_path / "no.html").exists()


def test_newest_limits_the_report_to_the_newest_versions(run_dir: Path, tmp_path: Path) -> None:
    page = page_of(run_dir, tmp_path / "r.html", "--newest", 2)
    assert [row[0] for row in cells(page, "versions")] == ["3", "4"]
    assert "The newest 2 of its 4 versions" in page


def test_exports_and_their_failures_are_listed(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path / "run")) as cluster:
        cluster.save({"w": torch.ones(2)}, step=7)
    done, failed = {"s3://b/served/version-00000001": 1}, {"s3://b/served/version-00000002": "AccessDenied \x1b[2J<b>"}
    repository = open_repository(str(tmp_path / "run"))
    repository.register.update(lambda root: replace(root, exports=done, failed_exports=failed))
    facts = run_json("report", tmp_path / "run", "-o", tmp_path / "r.html")
    assert (facts["exports"], facts["failed_exports"]) == (done, failed)
    page = page_of(tmp_path / "run", tmp_path / "r.html")
    assert cells(page, "exports") == [
        ["s3://b/served/version-00000001", "version 1"],
        ["s3://b/served/version-00000002", "failed: AccessDenied \\x1b[2J<b>"],
    ]
    assert "<b>" not in page
    result = run("report", tmp_path / "run", "-o", tmp_path / "r.html")
    assert "warning: the export to s3://b/served/version-00000002 failed: AccessDenied \\x1b[2J<b>" in result.output
    listed = run("ls", tmp_path / "run").output
    assert "the export to s3://b/served/version-00000002 failed: AccessDenied \\x1b[2J<b>" in listed


def test_an_empty_repository_makes_a_page(tmp_path: Path) -> None:
    create_repository(str(tmp_path / "run"))
    assert "There is no version yet." in page_of(tmp_path / "run", tmp_path / "r.html")


def test_a_version_without_any_statistics_makes_a_page(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path / "run")) as cluster:
        # No tensor: no bytes, no ratio, no stall, no restore. No metric can be drawn.
        cluster.save({"n": 1}, step=0, metrics={"none": float("nan"), "infinite": float("inf"), "huge": 10**400})
    page = page_of(tmp_path / "run", tmp_path / "r.html", *PRICES)
    assert [name for name in PLOTS if f'id="plot-{name}"' in page] == ["bytes", "cost"]
    assert "No version has any bytes." in page


def test_a_damaged_record_is_reported_and_the_rest_is_shown(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path / "run")) as cluster:
        damaged, _ = (cluster.save({"w": torch.ones(1000)}, step=step, stall=0.5) for step in (1, 2))
    record = tmp_path / "run" / keys.record(damaged.id, damaged.attempt)
    record.write_bytes(record.read_bytes().replace(b"world_size", b"World_size"))
    result = run("report", tmp_path / "run", "-o", tmp_path / "r.html")
    assert result.exit_code == 0
    assert "warning: the record of version 1 cannot be read: Damaged" in result.stderr
    page = (tmp_path / "r.html").read_text()
    assert "The record of version 1 cannot be read: Damaged" in page
    assert [row[7] for row in cells(page, "versions")] == ["-", "500 ms"]


def test_a_failed_report_does_not_replace_the_page(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.html").write_text("of yesterday")
    assert run("report", tmp_path / "nowhere", "-o", tmp_path / "r.html").exit_code == 4
    for missing in (tmp_path / "no" / "r.html", tmp_path / "r.html" / "r.html"):
        error = run_json("report", run_dir, "-o", missing, code=1)["error"]
        assert error["subject"] == str(missing)
        assert error["remedy"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    assert (tmp_path / "r.html").read_text() == "of yesterday"
    page_of(run_dir, tmp_path / "r.html")
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_only_a_regular_file_is_replaced(run_dir: Path, tmp_path: Path) -> None:
    """As root, ``-o /dev/null`` would replace the device by a file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "page").touch()
    (tmp_path / "link").symlink_to(tmp_path / "page")
    assert run_json("report", run_dir, "-o", tmp_path / "pipe", code=2)["error"]["subject"] == str(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    assert page_of(run_dir, tmp_path / "link") == (tmp_path / "page").read_text()
    assert (tmp_path / "link").is_symlink()


def test_a_link_to_another_folder_is_not_replaced(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "here" / "report.html").symlink_to(tmp_path / "mine")
    error = run_json("report", run_dir, "-o", tmp_path / "here" / "report.html", code=2)["error"]
    assert "leads out of its folder" in error["what"]
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("words", [("--gpus", 8), ("--gpus", 8, "--store-price", 1)])
def test_gpus_without_their_price_are_refused(run_dir: Path, tmp_path: Path, words: tuple[object, ...]) -> None:
    assert run("report", run_dir, "-o", tmp_path / "r.html", *words).exit_code == 2


def test_other_commands_do_not_import_the_report_libraries() -> None:
    code = "import sys; from raystow.cli.app import build; build(); print({'plotly', 'jinja2'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_policy_allows_scripts_of_this_page_only(run_dir: Path, whole: Path, tmp_path: Path) -> None:
    """By a number that each page draws: no text of the repository can know it."""
    pages = whole.read_text(), page_of(run_dir, tmp_path / "r.html")
    policies = [re.search(r"script-src '([^;]*)'; img-src", page) for page in pages]
    nonces = [policy[1].removeprefix("nonce-") for policy in policies if policy is not None]
    assert [len(nonce) for nonce in {*nonces}] == [32, 32]
    for page, nonce in zip(pages, nonces, strict=True):
        run_scripts = [tag for tag in re.findall(r"<script[^>]*>", page) if "application/json" not in tag]
        assert run_scripts[-2:] == [f'<script nonce="{nonce}">'] * 2


# Tests in a browser

_LEGIBLE = """() => {
  const rgb = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = color => rgb(color).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const paper = getComputedStyle(document.body).backgroundColor;
  const least = (selector, property) => Math.min(...[...document.querySelectorAll(selector)]
    .map(node => getComputedStyle(node)[property]).filter(color => color.startsWith('rgb')).map(color => contrast(color, paper)));
  return {paper, text: Math.min(least('svg text', 'fill'), least('p, td, th, h1, h2', 'color')),
    series: Math.min(least('.scatterlayer .point, .barlayer .point path', 'fill'), least('.scatterlayer .js-line', 'stroke'))};
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_legible_and_complete_in_a_browser(browser: Any, whole: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    try:
        page, problems, requested = context.new_page(), list[str](), list[str]()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(whole.as_uri())
        page.wait_for_selector(f"#plot-{PLOTS[-1]} .xtick")
        assert problems == []
        assert [url for url in requested if not url.startswith("data:")] == [whole.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        for name in PLOTS:
            box = page.locator(f"#plot-{name}").bounding_box()
            assert box["width"] > 300
            assert box["height"] > 150
            assert page.locator(f"#plot-{name} text").count() > 4
        assert page.get_by_role("img", name=re.compile("version|restore|interval")).count() == len(PLOTS)
        looks = page.evaluate(_LEGIBLE)
        assert looks["text"] >= 4.5  # WCAG 2.2, 1.4.3
        assert looks["series"] >= 3  # and 1.4.11
        assert looks["paper"] == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
        assert len(ids) == len(set(ids))
    finally:
        context.close()


def test_a_script_of_another_origin_is_not_run(browser: Any, whole: Path, tmp_path: Path) -> None:
    """As if text of the repository had not been escaped."""
    evil = tmp_path / "evil.html"
    added = '<script>document.title = "evil"</script><img src="x:" onerror="document.title = \'evil\'">'
    evil.write_text(whole.read_text().replace("<main>", f"<main>{added}"))
    page = browser.new_page()
    try:
        page.goto(evil.as_uri())
        page.wait_for_selector(f"#plot-{PLOTS[-1]} .xtick")
        assert page.title().startswith("Checkpoints of")
    finally:
        page.close()


@pytest.mark.long
def test_the_page_prints_on_white_paper(browser: Any, whole: Path) -> None:
    context = browser.new_context(color_scheme="dark", viewport={"width": 718, "height": 1047})  # A4 with margins of 1 cm
    try:
        page = context.new_page()
        page.goto(whole.as_uri())
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.wait_for_function("getComputedStyle(document.querySelector('#plot-bytes .xtick text')).fill == 'rgb(68, 68, 68)'")
        assert page.pdf(format="A4").startswith(b"%PDF-")
    finally:
        context.close()
