"""The page in real headless Chromium: what can be seen, clicked, typed and heard."""

from __future__ import annotations

import inspect
import json

import pytest

import mil_ane_passes as ane
from mil_ane_passes.report.html import build_page
from mil_ane_passes.report.lint_groups import find_costliest
from mil_ane_passes.utils.pass_description import describe_pass
from tests.report import programs
from tests.report.chromium import browser, complaints, missing, open_page, requests

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "can be run")]

TAB, ENTER, DOWN, RIGHT, END = "\ue004", "\ue007", "\ue015", "\ue014", "\ue010"


@pytest.fixture(scope="module")
def driver():
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Opens a page, and afterwards it must have been silent and must have asked for nothing."""
    folder = tmp_path_factory.mktemp("pages")
    made: dict[str, str] = {}

    def text_of(name: str) -> str:
        if name not in made:
            if name == "both":
                changed = programs.vocoder()
                ane.rewrite(changed, dst=changed, preset="full", verify=False)
                made[name] = build_page(ane.lint(programs.vocoder(), target="m4"), ane.lint(changed, target="m4"))
            elif name == "measured":
                said = programs.said_by_a_mac(ane.lint(programs.vocoder(), target="m4"))
                made[name] = build_page(ane.lint(programs.vocoder(), target="m4", measured=said))
            else:
                made[name] = build_page(ane.lint(getattr(programs, name)(), target="m4"))
        return made[name]

    return lambda driver, name: open_page(driver, text_of(name), folder, name)


@pytest.fixture
def show(driver, pages):
    driver.set_window_size(1440, 1000)
    yield lambda name: pages(driver, name)
    assert complaints(driver) == []
    assert requests(driver) == []


def run(driver, code: str, *arguments):
    return driver.execute_script(code, *arguments)


def press(driver, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    chain = ActionChains(driver, duration=0)
    for key in keys:
        chain.send_keys(key)
    chain.perform()


def settled(driver) -> None:
    """Two frames later: what was put off to the next frame is drawn."""
    driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")


def rows(driver, host: str = "#ops-grid") -> list[list[str]]:
    settled(driver)
    return run(
        driver,
        """return [...document.querySelectorAll(arguments[0] + " .grid-body [role=row]")].map(
        (row) => [...row.children].map((cell) => cell.textContent))""",
        host,
    )


def details(driver) -> str:
    return run(driver, "return document.getElementById('details-body').innerText")


def type_search(driver, words: str) -> None:
    run(driver, "const i = document.querySelector('[name=words]'); i.value = ''; i.focus()")
    press(driver, words)


def test_it_says_that_all_is_predicted_and_on_what_that_rests(show, driver):
    show("vocoder")
    seen = run(driver, "return document.querySelector('#summary').innerText")
    assert "Predicted. The model was not run" in seen and "M4" in seen
    assert run(driver, "return document.querySelector('#facts').textContent").startswith("Target m4 (M4)")


def test_every_finding_is_reached_by_keys_alone_and_shows_its_details(show, driver):
    show("vocoder")
    report = ane.lint(programs.vocoder(), target="m4")
    expected = sorted(
        f"{item.rule.code} {item.rule.slug}\n{item.reason}" for item in [*report.findings, *report.near_misses]
    )
    seen: list[str] = []
    for _ in range(400):
        press(driver, TAB)
        kind, opened = run(
            driver,
            """const one = document.activeElement;
            const kind = one.matches('summary') ? 'group' : one.matches('.item') ? 'item' : '';
            return [one.closest('#finding-list') ? kind : '', one.parentElement && one.parentElement.open]""",
        )
        if kind == "group" and not opened:
            press(driver, ENTER)
        if kind != "item":
            if seen and run(driver, "return Boolean(document.activeElement.closest('#ops'))"):
                break
            continue
        more = True
        while more:
            press(driver, ENTER)
            seen.append(
                run(
                    driver,
                    """const one = document.querySelector('.finding.chosen');
                return one.querySelector('h3').textContent + '\\n' + one.querySelector('.says').textContent""",
                )
            )
            here = run(driver, "return document.activeElement")
            press(driver, DOWN)
            more = run(driver, "return document.activeElement !== arguments[0]", here)
    assert sorted(seen) == expected


def test_details_tell_reason_evidence_confidence_and_fix(show, driver):
    show("vocoder")
    report = ane.lint(programs.vocoder(), target="m4")
    item = next(one for one in report.findings if one.fix and one.fix["pass"])
    place = report.findings.index(item)
    run(driver, "document.querySelectorAll('#finding-list summary').forEach((one) => one.click())")
    run(
        driver,
        """for (const one of document.querySelectorAll('#finding-list .item'))
        if (one.finding.place === arguments[0]) one.click()""",
        place,
    )
    seen = details(driver)
    for words in (
        item.reason,
        item.rule.confidence,
        item.fix["pass"],
        describe_pass(item.fix["exactness"], item.fix["preset"]),
        item.rule.evidence[0].says,
        item.rule.evidence[0].source,
        f"mil_ane_passes.rewrite(..., passes='{item.fix['pass'].removeprefix('ane::')}', target='m4')",
    ):
        assert words in seen, words
    assert report.mil(report.plan.rows[item.index]) in seen
    assert item.value in run(driver, "return document.getElementById('said').textContent")


def test_search_and_filters_leave_the_ops_that_fit(show, driver):
    show("vocoder")
    report = ane.lint(programs.vocoder(), target="m4")
    everything = len(rows(driver))
    assert everything == len(report.plan.rows)
    type_search(driver, "GROW conv_tr")
    assert [row[1] for row in rows(driver)] == ["conv_transpose"]
    assert run(driver, "return document.getElementById('ops-count').textContent") == f"1 of {everything} ops"
    run(driver, "document.querySelector('#filters [type=reset]').click()")
    assert len(rows(driver)) == everything
    for name, value, kept in (
        ("answer", "no", [row for row in report.plan.rows if row.ane == "no"]),
        ("backend", "CPU", [row for row in report.plan.rows if row.backend == "cpu"]),
        ("code", "ANE501", [row for row in report.plan.rows if "ANE501" in row.codes]),
    ):
        run(
            driver,
            """const one = document.querySelector(`#filters [name=${arguments[0]}]`); one.value = arguments[1];
            one.dispatchEvent(new Event('input', {bubbles: true}))""",
            name,
            value,
        )
        assert [int(row[0]) for row in rows(driver)] == [row.index for row in kept], name
        run(driver, "document.querySelector('#filters [type=reset]').click()")
        settled(driver)
    type_search(driver, "no such op")
    assert rows(driver) == [["No op matches these filters."]]


def test_columns_sort_both_ways_and_say_so(show, driver):
    show("vocoder")
    head = "#ops-grid [role=columnheader]:nth-child(%d)"
    for column, numbers in ((7, True), (3, False)):
        orders = []
        for _ in range(2):
            run(driver, f"document.querySelector('{head % column} button').click()")
            shown = [row[column - 1] for row in rows(driver)]
            keys = [float(cell) for cell in shown] if numbers else shown
            way = run(driver, f"return document.querySelector('{head % column}').getAttribute('aria-sort')")
            assert keys == sorted(keys, reverse=way == "descending")
            orders.append(way)
        assert sorted(orders) == ["ascending", "descending"]
    assert "Sorted by Output" in run(driver, "return document.getElementById('said').textContent")


def test_the_table_goes_by_keys(show, driver):
    show("vocoder")
    run(driver, "document.querySelector('#ops-grid .grid').focus()")
    press(driver, DOWN, DOWN, ENTER)
    third = ane.lint(programs.vocoder()).plan.rows[2].op.outputs[0].name
    assert third in details(driver)
    press(driver, END)
    settled(driver)
    active = run(
        driver,
        """const grid = document.querySelector('#ops-grid .grid');
        return document.getElementById(grid.getAttribute('aria-activedescendant')).textContent""",
    )
    assert rows(driver)[-1][2] in active


def test_the_graph_zooms_moves_and_chooses_by_keys(show, driver):
    show("vocoder")
    state = "const c = document.getElementById('canvas').dataset; return [Number(c.zoom), c.centre]"
    run(driver, "document.getElementById('canvas').focus()")
    press(driver, "0")
    settled(driver)
    whole = run(driver, state)
    for keys, changed in (("+", "zoom"), ("-", ""), ("-", "zoom"), (RIGHT, "centre"), (DOWN, "centre")):
        before = run(driver, state)
        press(driver, keys)
        settled(driver)
        after = run(driver, state)
        if changed:
            assert after[["zoom", "centre"].index(changed)] != before[["zoom", "centre"].index(changed)], keys
    press(driver, "0")
    settled(driver)
    assert run(driver, state) == whole
    press(driver, "]", "]")
    first, second = [row.op.outputs[0].name for row in ane.lint(programs.vocoder()).plan.rows[:2]]
    assert second in run(driver, "return document.getElementById('said').textContent")
    press(driver, "[", ENTER)
    assert first in details(driver)


def test_the_graph_zooms_by_wheel_and_buttons_and_chooses_by_click(show, driver):
    from selenium.webdriver.common.action_chains import ActionChains

    show("vocoder")
    canvas = driver.find_element("id", "canvas")
    zoom = "return Number(document.getElementById('canvas').dataset.zoom)"
    run(driver, "document.getElementById('graph').scrollIntoView()")
    start = run(driver, zoom)
    run(driver, "document.getElementById('zoom-in').click()")
    settled(driver)
    assert run(driver, zoom) > start
    wheel = """document.getElementById('canvas').dispatchEvent(
        new WheelEvent('wheel', {deltaY: arguments[0], ctrlKey: true, cancelable: true}))"""
    before = run(driver, zoom)
    run(driver, wheel, 120)
    settled(driver)
    assert run(driver, zoom) < before
    run(driver, "document.getElementById('canvas').focus()")
    press(driver, "0", "]")
    settled(driver)
    row, x, y = map(int, run(driver, "return document.getElementById('canvas').dataset.ring").split(","))
    width, height = run(driver, "const c = document.getElementById('canvas'); return [c.clientWidth, c.clientHeight]")
    beside = ActionChains(driver, duration=0).move_to_element_with_offset(canvas, x - width // 2, y - height // 2)
    beside.click().perform()
    assert row == 0 and ane.lint(programs.vocoder()).plan.rows[0].op.outputs[0].name in details(driver)
    place = "return document.getElementById('canvas').dataset.centre"
    before = run(driver, place)
    ActionChains(driver, duration=50).move_to_element(canvas).click_and_hold().move_by_offset(
        80, 30
    ).release().perform()
    settled(driver)
    assert run(driver, place) != before


def test_segments_are_chosen_by_keys_and_tell_their_ops(show, driver):
    show("vocoder")
    report = ane.lint(programs.vocoder(), target="m4")
    labels = run(
        driver, "return [...document.querySelectorAll('.segment')].map((one) => one.getAttribute('aria-label'))"
    )
    assert len(labels) == len(report.plan.segments)
    assert all(label.startswith(("ANE: ", "CPU: ")) for label in labels)
    run(driver, "document.querySelector('.segment').focus()")
    press(driver, END, ENTER)
    assert run(driver, "return document.querySelectorAll('.segment[aria-selected=true]').length") == 1
    assert f"{report.plan.segments[-1].last - report.plan.segments[-1].first + 1} op" in details(driver)


def test_the_theme_follows_the_system_and_the_toggle(show, driver):
    theme = "return document.documentElement.dataset.theme"
    for system in ("dark", "light"):
        driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": system}]}
        )
        show("vocoder")
        run(driver, "try { localStorage.clear() } catch {}")
        show("vocoder")
        assert run(driver, theme) == system
    page_colour = "return getComputedStyle(document.body).backgroundColor"
    light = run(driver, page_colour)
    run(driver, "document.getElementById('theme').click()")
    assert run(driver, theme) == "dark" and run(driver, page_colour) != light
    assert run(driver, "return document.getElementById('theme').textContent") == "Light theme"
    run(driver, "document.getElementById('theme').click(); try { localStorage.clear() } catch {}")


def test_before_and_after_stand_side_by_side(show, driver):
    show("both")
    left, right = run(
        driver, "return [...document.querySelectorAll('#versus > div')].map((one) => one.getBoundingClientRect().x)"
    )
    assert left < right
    assert run(driver, "return document.querySelectorAll('#versus .strip').length") == 2
    run(driver, "document.querySelectorAll('#changed summary').forEach((one) => one.click())")
    settled(driver)
    seen = run(driver, "return document.getElementById('changed').innerText")
    assert "expand_dims" in seen and "ANE301" in seen
    run(driver, "document.querySelectorAll('#sides button')[1].click()")
    assert "expand_dims" in [row[1] for row in rows(driver)]
    run(driver, "document.querySelector('#changed details .item').click()")
    assert run(driver, "return document.querySelector('#sides button').getAttribute('aria-pressed')") == "true"
    assert details(driver)


def test_what_a_mac_said_stands_beside_the_prediction(show, driver):
    show("measured")
    seen = run(driver, "return document.getElementById('measured').innerText")
    assert seen.startswith("Measured on M4, macOS 26.1") and "partition:" in seen
    basis = run(driver, "return document.getElementById('basis').textContent")
    assert "The model was not run" not in basis
    assert "The report also shows Core ML's measurement on M4, macOS 26.1" in basis
    run(driver, "document.querySelector('#measured-ops .item').click()")
    assert "phase" in details(driver) and "on the ANE, supported on the ANE" in details(driver)


def test_names_that_look_like_markup_are_shown_as_text(show, driver):
    show("hostile")
    assert run(driver, "return document.images.length + document.querySelectorAll('script').length") == 2
    assert any("</script><img src=x onerror=alert(1)>" in row[2] for row in rows(driver))
    run(driver, "document.querySelector('#ops-grid .grid-row[role=row][id]').click()")
    assert "</script><img" in details(driver)


def test_long_names_fit_in_their_boxes(show, driver):
    show("long_names")
    for width in (1400, 1280):
        driver.set_window_size(width, 1000)
        settled(driver)
        wide = run(driver, """return [...document.querySelectorAll('aside, aside *, main > section')].filter((one) =>
            one.scrollWidth > one.clientWidth + 1 && one.clientWidth && getComputedStyle(one).display !== 'inline'
            && getComputedStyle(one).textOverflow !== 'ellipsis').map((one) => one.outerHTML.slice(0, 80))""")
        assert wide == []


def test_the_label_of_a_segment_is_cut_at_its_end(show, driver):
    show("long_names")
    labels = run(driver, """return [...document.querySelectorAll('.segment .long')].filter(
        (one) => one.offsetWidth).map((one) => [
            one.textContent, one.getBoundingClientRect().x - one.parentElement.getBoundingClientRect().x])""")
    assert "CPU · 2 ops · 2 fp32 ops unsupported" in [words for words, _ in labels]
    assert all(start >= 0 for _, start in labels)


def test_a_program_without_ops_says_so(show, driver):
    show("empty")
    assert "no ops" in run(driver, "return document.getElementById('verdict').textContent")
    assert rows(driver) == [["No op matches these filters."]]


def test_the_verdict_counts_unsupported_and_unmeasured_ops_as_lint_does(show, driver):
    show("vocoder")
    support = str(ane.lint(programs.vocoder(), target="m4").plan.support)
    assert support and support in run(driver, "return document.getElementById('verdict').textContent")


def test_functions_have_a_strip_and_a_graph_each(show, driver):
    show("two_functions")
    assert run(driver, "return document.querySelectorAll('.strip').length") == 2
    label = "return document.getElementById('canvas').getAttribute('aria-label')"
    assert run(driver, label).startswith("Graph of encode: 2 ops")
    run(
        driver, "const s = document.getElementById('graph-function'); s.value = 1; s.dispatchEvent(new Event('change'))"
    )
    assert run(driver, label).startswith("Graph of decode: 2 ops")
    run(driver, "document.querySelectorAll('#ops-grid .grid-row[id]')[0].click()")
    assert run(driver, label).startswith("Graph of encode")


def test_ten_thousand_ops_keep_the_document_small(show, driver):
    show("large")
    many = "return document.querySelectorAll(arguments[0]).length"
    assert run(driver, many, "#ops-grid .grid-body [role=row]") < 60
    assert run(driver, many, "*") < 3000
    grid = "document.querySelector('#ops-grid .grid')"
    assert int(run(driver, f"return {grid}.getAttribute('aria-rowcount')")) == 10_001
    run(driver, f"{grid}.scrollTop = 150000")
    assert rows(driver)[0][0].isdigit() and 4900 < int(rows(driver)[5][0]) < 5100
    assert len(rows(driver)) < 60
    drawn = "return Number(document.getElementById('canvas').dataset.drawn)"
    settled(driver)
    assert run(driver, drawn) == 10_000
    run(driver, "document.querySelector('#ops-grid .grid-row[id]').click()")
    settled(driver)
    assert 0 < run(driver, drawn) < 400
    shown = run(
        driver, "return [...document.querySelectorAll('.segment')].map((one) => one.getAttribute('aria-label'))"
    )
    assert 80 < len(shown) <= 160 and all("short partitions" in label for label in shown)


def test_everything_one_can_use_has_a_name(show, driver):
    show("both")
    run(driver, "document.querySelector('#finding-list .item').click()")
    nodes = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    useful = {
        "button",
        "link",
        "textbox",
        "searchbox",
        "combobox",
        "option",
        "listbox",
        "listitem",
        "grid",
        "application",
        "columnheader",
        "table",
        "region",
        "complementary",
        "DisclosureTriangle",
        "heading",
    }
    roles = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and "role" in node
    ]
    unnamed = [role for role, name in roles if role in useful - {"listitem"} and not name.strip()]
    assert unnamed == []
    assert {role for role, _ in roles} >= {
        "main",
        "complementary",
        "banner",
        "grid",
        "listbox",
        "application",
        "search",
    }
    levels = run(driver, "return [...document.querySelectorAll('h1,h2,h3,h4')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    ids = run(driver, "return [...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))


CONTRAST = """
const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const ground = (one) => {
  for (; one; one = one.parentElement) {
    const colour = numbers(getComputedStyle(one).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const one = walk.currentNode.parentElement;
  if (!walk.currentNode.textContent.trim() || !one.checkVisibility()) continue;
  if (['SCRIPT', 'NOSCRIPT', 'OPTION'].includes(one.tagName)) continue;
  const [a, b] = [light(numbers(getComputedStyle(one).color)), light(ground(one))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push([walk.currentNode.textContent.slice(0, 40), ratio.toFixed(2), one.className]);
}
return found;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_in_both_themes(show, driver, theme):
    show("both")
    if run(driver, "return document.documentElement.dataset.theme") != theme:
        run(driver, "document.getElementById('theme').click()")
    run(driver, "document.querySelector('#finding-list .item').click()")
    run(driver, "document.getAnimations().forEach((one) => one.finish())")
    assert run(driver, CONTRAST) == []
    pairs = run(
        driver,
        """const of = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
        return [['text', 'ane-soft'], ['text', 'cpu-soft'], ['soft', 'ane-soft'], ['soft', 'cpu-soft'],
                ['on-ane', 'ane'], ['on-cpu', 'cpu'], ['soft', 'page'], ['soft', 'sunk'], ['text', 'sunk']]
            .map((pair) => [...pair, ...pair.map(of)])""",
    )
    for ink, paper, *colours in pairs:
        assert contrast(*colours) >= 4.5, (ink, paper)


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear))

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_narrow_window_shows_all_without_scrolling_sideways(show, driver):
    show("both")
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        settled(driver)
        assert run(driver, "return document.documentElement.scrollWidth") <= 380
        assert not run(driver, "return document.getElementById('details').checkVisibility()")
        run(driver, "const one = document.querySelector('#finding-list .item'); one.focus(); one.click()")
        assert run(driver, "return document.getElementById('details').checkVisibility()")
        run(driver, "document.getElementById('details-close').click()")
        assert not run(driver, "return document.getElementById('details').checkVisibility()")
        assert run(driver, "return document.activeElement.matches('.item')")
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_log_would_tell(driver, tmp_path):
    """The checks after each test can fail: a page with an error and a picture from elsewhere is found out."""
    path = tmp_path / "bad.html"
    path.write_text("<script>undefinedName()</script><img src='http://127.0.0.1:9/x.png'>")
    driver.get_log("performance"), driver.get_log("browser")
    driver.get(path.as_uri())
    settled(driver)
    assert any("undefinedName" in message for message in complaints(driver))
    assert json.dumps(requests(driver)) == '["http://127.0.0.1:9/x.png"]'


def test_tables_fit_in_a_window_of_1400_pixels(show, driver):
    show("vocoder")
    driver.set_window_size(1400, 1000)
    settled(driver)
    for name in ("ops", "buffers", "weights"):
        inner, outer = run(driver, f"const box = document.querySelector('#{name}-grid .grid');"
                                   "return [box.scrollWidth, box.clientWidth]")
        assert inner <= outer
    show("large")
    driver.set_window_size(1400, 1000)
    settled(driver)
    cut = run(driver, """return [...document.querySelectorAll('#ops-grid .grid-body .cell')].filter(
        (cell) => cell.scrollWidth > cell.clientWidth && !['3', '9'].includes(cell.getAttribute('aria-colindex'))).map(
        (cell) => cell.textContent)""")
    assert cut == []  # names and reasons may be of any length; the others are whole


def test_segments_name_what_keeps_them_off_the_ane(show, driver):
    show("vocoder")
    assert "1 cumsum unsupported" in run(
        driver, "return document.querySelector('.segment.cpu .long').textContent")
    run(driver, "document.querySelector('.segment.cpu').dispatchEvent(new Event('pointerover', {bubbles: true}))")
    assert "1 cumsum unsupported" in run(driver, "return document.querySelector('.strip-hint').textContent")


def test_the_severity_of_findings_has_a_sign_beside_its_color(show, driver):
    show("vocoder")
    heads = run(driver, "return [...document.querySelectorAll('#finding-list h3.tier[class*=tier-]')]"
                        ".map(head => [head.textContent, getComputedStyle(head).color])")
    assert len(heads) > 1 and len({color for _, color in heads}) == len({text[0] for text, _ in heads}) == len(heads)
    assert "keep all 6 ops on the CPU" in run(driver, "return document.getElementById('further').textContent")


def test_the_next_step_is_there_with_its_command_and_its_forecast(show, driver):
    show("vocoder")
    step = ane.lint(programs.vocoder(), target="m4").next_step
    seen = run(driver, "return document.getElementById('step').innerText")
    assert seen.startswith("Next step") and step.words in seen
    assert run(driver, "return document.querySelector('#step .command').textContent") == step.command
    cells = run(driver, "return [...document.querySelectorAll('#step tbody tr')].map("
                        "(row) => [...row.children].map((cell) => cell.textContent))")
    assert cells[:2] == [["ops on the ANE", "0 of 6", "0 of 8"], ["unsupported ops", "2", "2"]]
    assert cells[2][0] == "latency" and all(cell.endswith(" ms") for cell in cells[2][1:])
    show("two_functions")
    assert not run(driver, "return document.getElementById('step').checkVisibility()")


@pytest.mark.parametrize("allowed", [True, False])
def test_the_command_is_copied_or_else_selected(show, driver, allowed):
    show("vocoder")
    run(driver, """window.copied = [];
        const clipboard = {writeText: (text) => arguments[0]
            ? (window.copied.push(text), Promise.resolve()) : Promise.reject(new Error('not allowed'))};
        Object.defineProperty(navigator, 'clipboard', {value: clipboard, configurable: true});
        document.execCommand = () => false;""", allowed)
    run(driver, "document.querySelector('#step .copy').click()")
    settled(driver)
    command = run(driver, "return document.querySelector('#step .command').textContent")
    copied, chosen, said = run(driver, "return [window.copied, getSelection().toString(),"
                                       "document.querySelector('#step .copy').textContent]")
    assert (copied, said) == ([command], "Copied") if allowed else (chosen == command and said.startswith("Selected"))


def test_what_costs_most_is_chosen_when_the_page_opens(show, driver):
    show("large")
    report = ane.lint(programs.large(), target="m4")
    costliest = find_costliest(report.findings, report.plan)
    current = "return document.querySelector('#finding-list [aria-current=true]')?.textContent"
    assert costliest.value in details(driver) and run(driver, current) is None  # folded: its row is marked
    run(driver, "document.querySelector('#finding-list summary.holds').click()")
    assert costliest.value in run(driver, current)
    assert run(driver, "return document.getElementById('said').textContent") == ""
    assert run(driver, "return window.scrollY") == 0


def test_in_a_narrow_window_the_details_wait(driver, pages):
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 500, "height": 800, "deviceScaleFactor": 1, "mobile": False})
    try:
        pages(driver, "vocoder")
        assert not run(driver, "return document.getElementById('details').checkVisibility()")
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_findings_that_read_the_same_share_a_row(show, driver):
    show("large")
    report = ane.lint(programs.large(), target="m4")
    alike = [item for item in report.findings if item.code == "ANE205"]
    (row,) = run(driver, "return [...document.querySelectorAll('#finding-list details.same > summary')].map("
                         "(one) => one.textContent).filter((one) => one.includes('cumsum'))")
    assert row == f"{len(alike)}× cumsum{alike[0].reason}" and len({item.reason for item in alike}) == 1
    assert run(driver, "return document.querySelectorAll('#finding-list details.same .item').length") == 0
    run(driver, "document.querySelector('#finding-list details.same > summary').click()")
    names = run(driver, "return [...document.querySelectorAll('#finding-list details.same .item .what')].map("
                        "(one) => one.textContent)")
    assert names == [item.value for item in alike[:10]]


def test_suggestions_and_near_misses_are_folded(show, driver):
    show("vocoder")
    report = ane.lint(programs.vocoder(), target="m4")
    quiet = [item for item in report.findings if not item.severity.fails]
    assert quiet and report.near_misses
    folds = run(driver, "return [...document.querySelectorAll('#finding-list > details.near, .apart > details.near')]"
                        ".map((one) => [one.open, one.querySelector('.group-side').innerText])")
    assert [opened for opened, _ in folds] == [False] * 2
    assert [words.split("×")[0] for _, words in folds] == [str(len(quiet)), str(len(report.near_misses))]


def test_an_op_shows_its_attributes_and_its_weights(show, driver):
    show("vocoder")
    run(driver, "[...document.querySelectorAll('#ops-grid .grid-row[id]')].find("
                "(row) => row.textContent.includes('conv_transpose')).click()")
    seen = details(driver)
    for words in ("Attributes", "strides\n[2]", "Weight\n", "fp16[8, 4, 4]", "256 B", "Range", "deviation", "Zeros"):
        assert words in seen, words


def test_a_code_leads_to_the_page_of_its_rule(show, driver):
    show("vocoder")
    report = ane.lint(programs.vocoder(), target="m4")
    item = find_costliest(report.findings, report.plan)
    run(driver, "document.querySelector('.finding .rule-link').click()")
    settled(driver)
    link, seen, top = run(driver, """const link = document.querySelector('.finding .rule-link');
        const page = document.querySelector(link.hash);
        return [link.textContent, page.innerText, page.getBoundingClientRect().top]""")
    assert link == item.rule.code and inspect.getdoc(item.rule) in seen and f"explain {link}" in seen
    assert 0 <= top < 1000
    codes = run(driver, "return [...document.querySelectorAll('#rules details')].map((one) => one.id)")
    assert codes == sorted({f"rule-{one.rule.code}" for one in [*report.findings, *report.near_misses]})


def test_buffers_are_explained_in_words(show, driver):
    show("vocoder")
    buffers = ane.lint(programs.vocoder(), target="m4").buffers
    worst = max(buffers, key=lambda one: one.rows - one.dense)
    words = run(driver, "return document.getElementById('buffers-words').textContent")
    assert f"is for {worst.value}: a tensor of {'×'.join(map(str, worst.shape))} has" in words


def test_weights_are_listed_by_size_with_totals_by_format(show, driver):
    from mil_ane_passes.package.storage import survey_storage

    show("vocoder")
    found = survey_storage(programs.vocoder())
    words = run(driver, "return document.getElementById('weights-words').textContent")
    assert all(f"{each.format}: {each.count} weight" in words for each in found.formats)
    rows = run(driver, """return [...document.querySelectorAll('#weights-grid [role=row]')].map(
        (one) => one.textContent)""")
    largest = found.weights[0]
    shape = "×".join(map(str, largest.shape))
    assert len(rows) == 1 + len(found.weights) and f"{shape}{largest.format}{largest.reader}" in rows[1]
    run(driver, "document.querySelectorAll('#weights-grid [role=row]')[1].click()")
    assert details(driver).startswith(largest.reader)


def test_the_whole_graph_is_moved_as_a_picture(show, driver):
    from tests.report.panning import measure_panning

    show("large")
    run(driver, "window.painted = 0; const one = CanvasRenderingContext2D.prototype; const fill = one.fillRect;"
                "one.fillRect = function (...given) { window.painted++; return fill.apply(this, given); }")
    found = measure_panning(driver, 0, 500)
    assert found["moved"] > 3 and run(driver, "return window.painted") < 200 < found["drawn"]
    assert measure_panning(driver, 9, 500)["drawn"] < 400


def test_a_picture_shows_what_drawing_shows(show, driver):
    show("large")
    run(driver, "document.getElementById('graph').scrollIntoView()")
    colors = """const c = document.getElementById('canvas'), copy = new OffscreenCanvas(c.width, c.height);
        const pen = copy.getContext('2d', {willReadFrequently: true});
        pen.drawImage(c, 0, 0);
        const all = pen.getImageData(0, 0, c.width, c.height).data, seen = {};
        for (let at = 0; at < all.length; at += 4) {
            const name = all.slice(at, at + 3).join(); seen[name] = (seen[name] ?? 0) + 1; }
        const of = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
        const rgb = (hex) => [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16)).join();
        return ['ane', 'cpu'].map((name) => seen[rgb(of(name))] ?? 0)"""
    run(driver, "document.getElementById('zoom-fit').click()")
    settled(driver)
    ane_pixels, cpu_pixels = run(driver, colors)
    assert ane_pixels > 1000 and 0 < cpu_pixels < ane_pixels
    run(driver, "document.getElementById('theme').click()")
    settled(driver)
    assert all(many > 0 for many in run(driver, colors))
    run(driver, "document.getElementById('theme').click(); try { localStorage.clear() } catch {}")
