"""The page in headless Chromium: it loads without errors, sorts, switches, fits a phone, and stays quick when it is large."""

import contextlib
import json
import shutil
import time

import pytest

from equipoise.report import write_report

pytestmark = [pytest.mark.browser, pytest.mark.medium]
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--window-size=1200,900",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(service=webdriver.ChromeService(driver), options=options)
    found.set_page_load_timeout(120)
    yield found
    found.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory, report_parts):
    folder = tmp_path_factory.mktemp("pages")
    return {
        "usual": write_report(report_parts.whole(60, "net"), folder / "usual.html"),
        "hostile": write_report(report_parts.whole(12, report_parts.hostile), folder / "hostile.html"),
        "large": write_report(report_parts.whole(10_000, "net"), folder / "large.html"),
    }


@contextlib.contextmanager
def opened(browser, path, width=1200, height=900, dark=False):
    device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(path.as_uri())
    drawn = "c.querySelector('svg .plot, svg.main-svg')"
    wait(browser, f"return [...document.querySelectorAll('.chart')].every((c) => {drawn})")
    yield browser
    browser.execute_script("try { localStorage.clear(); } catch (e) { /* none */ }")
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def wait(browser, script, seconds=60):
    end = time.monotonic() + seconds
    while not browser.execute_script(script):
        assert time.monotonic() < end, script
        time.sleep(0.05)


def background(browser):
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def test_it_loads_and_draws(browser, pages):
    with opened(browser, pages["usual"]) as page:
        assert page.title == "net"
        curves = page.execute_script("return document.querySelectorAll('#curves-0 .scatterlayer .trace').length")
        assert curves == 7  # five procedures and two attacks
        assert page.execute_script("return [...document.images].every((i) => i.complete && i.naturalWidth > 0)")


def column(page, table, k):
    script = "return [...document.querySelectorAll(arguments[0] + ' tbody tr')].map((r) => r.cells[arguments[1]].textContent)"
    return page.execute_script(script, table, k)


def test_light_dark_and_on_paper(browser, pages):
    with opened(browser, pages["usual"], dark=True) as page:
        dark = background(page)
        page.execute_script("document.getElementById('theme').click();")
        light = background(page)
        assert sum(map(int, light[4:-1].split(","))) > 600 > 200 > sum(map(int, dark[4:-1].split(",")))
        ink = "return document.querySelector('#curves-0 .legendtext').style.fill"
        bright = page.execute_script(ink)
        page.execute_script("document.getElementById('theme').click();")
        assert background(page) == dark
        assert page.execute_script(ink) != bright  # the charts follow
    with opened(browser, pages["usual"]) as page:
        assert background(page) == light
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert background(page) == "rgb(255, 255, 255)"
        assert page.execute_script("return getComputedStyle(document.getElementById('save-json')).display") == "none"
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.parametrize("name", ["usual", "hostile"])
def test_a_phone_does_not_scroll_sideways(browser, pages, name):
    with opened(browser, pages[name], 360, 740) as page:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 360
        assert page.execute_script("return window.innerWidth") == 360


def test_hostile_strings_do_nothing(browser, pages, report_parts):
    with opened(browser, pages["hostile"]) as page:
        assert page.execute_script("return window.pwned === undefined")
        assert page.title == report_parts.hostile
        assert page.execute_script("return document.querySelectorAll('img[src=\"x\"]').length") == 0
        assert report_parts.hostile in page.execute_script("return document.getElementById('which').textContent")


def test_downloads_hold_every_number(browser, pages, report_parts):
    whole = report_parts.whole(60, "net")
    with opened(browser, pages["usual"]) as page:
        document = json.loads(page.execute_script("return window.equipoise.everything()"))
        assert document["series"][2]["radius"] == whole.series[2].results.radius.tolist()
        assert len(document["attacks"][0]["distance"]) == 60
        rows = page.execute_script("return window.equipoise.inputsCsv()").splitlines()
        assert len(rows) == 1 + 5 * 60
        assert float(rows[1].split(",")[-2]) == whole.series[0].results.radius[0]
        assert len(page.execute_script("return window.equipoise.layersCsv()").splitlines()) == 6
        page.execute_script("document.getElementById('save-json').click();")
        for table in page.execute_script("return [...document.querySelectorAll('table[id]')].map((t) => t.id)"):
            rows = page.execute_script("return document.getElementById(arguments[0]).rows.length", table)
            csv = page.execute_script("return window.equipoise.tableCsv(arguments[0])", table)
            assert len(csv.splitlines()) == rows
            latex = page.execute_script("return window.equipoise.tableLatex(arguments[0])", table)
            assert latex.count("\\\\") == rows
            assert latex.count(r"\begin{tabular}") == latex.count(r"\bottomrule") == 1
            assert not set("εασ→×∞%") & set(latex.partition("\n")[2].replace(r"\%", ""))


def test_a_spreadsheet_sees_no_formula(browser, tmp_path, report_parts):
    with opened(browser, write_report(report_parts.whole(5, "=1+1"), tmp_path / "formula.html")) as page:
        assert page.execute_script("return window.equipoise.inputsCsv()").splitlines()[1].startswith("'=1+1,'=1+1,")


def test_ten_thousand_inputs(browser, pages):
    assert pages["large"].stat().st_size < 10_000_000
    with opened(browser, pages["large"]) as page:
        assert page.execute_script("return document.querySelectorAll('#inputs tbody tr').length") == 25
        assert "of 10,000" in page.execute_script("return document.getElementById('place').textContent")
        page.execute_script("document.querySelectorAll('#inputs th button')[4].click();")
        radii = [float(v) for v in column(page, "#inputs", 4)]
        assert radii == sorted(radii)
        page.execute_script("document.querySelectorAll('#inputs th button')[4].click();")
        assert float(column(page, "#inputs", 4)[0]) > max(radii)
        page.execute_script("document.getElementById('on').click();")
        assert page.execute_script("return document.getElementById('place').textContent").startswith("26–50")
