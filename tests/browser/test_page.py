"""A page in a real browser: it draws, zooms, finds and explains; offline, without complaint, names as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from tests.browser.browsers import CONTRAST, Browser, browser, needs_browser
from tests.report.html_pages import HOSTILE, hostile

import steptime
from steptime._program.load import load
from steptime._report.answers import Prediction
from steptime._report.html.markup import clean
from steptime._report.words import time_ms
from steptime._sim.prediction import PredictedStep, predict

EXAMPLE = Path(__file__).parents[2] / "examples" / "dlrm_overlap4"

pytestmark = needs_browser

# How many colours the canvas shows; the longest run of pixels of one colour: its length, and its middle from the canvas's.
COLOURS = """
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
return new Set(new Uint32Array(data.buffer)).size
"""
LONGEST = """
const probe = document.createElement("i");
probe.style.color = `var(--${arguments[0]})`;
document.body.append(probe);
const [red, green, blue] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
probe.remove();
const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
let best = [0, 0, 0];
for (let y = 0; y < height; y++) {
  for (let x = 0, run = 0; x < width; x++) {
    const at = 4 * (y * width + x);
    run = data[at] === red && data[at + 1] === green && data[at + 2] === blue ? run + 1 : 0;
    if (run > best[0]) best = [run, x - (run >> 1), y];
  }
}
return [best[0], best[1] - (width >> 1), best[2] - (height >> 1)]
"""


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PredictedStep]:
    file, workload = tmp_path_factory.mktemp("page") / "page.html", load([EXAMPLE])
    prediction = predict(workload)
    Prediction.of(prediction).html(file)
    return file, prediction


@pytest.fixture
def page(opened: Browser, made: tuple[Path, PredictedStep]) -> Browser:
    opened.show(made[0])
    opened.execute_script(
        'byId = (id) => document.getElementById(id); byId("timeline").scrollIntoView({ behavior: "instant" })'
    )
    opened.settle()
    return opened


def element(page: Browser, name: str) -> WebElement:
    return page.find_element(By.ID, name)


def visible(page: Browser) -> tuple[float, float]:
    """The stretch of time that is drawn, in milliseconds."""
    page.settle()
    begin, end = element(page, "range").text.removesuffix(" ms").split(" – ")  # noqa: RUF001
    return float(begin), float(end)


def press(page: Browser, keys: str) -> None:
    element(page, "stage").send_keys(keys)
    page.settle()


def point_at(page: Browser, family: str) -> ActionChains:
    """Move the pointer to the widest bar of a family."""
    width, x, y = page.execute_script(LONGEST, family)
    assert width > 2, f"no bar of {family} is drawn"
    ActionChains(page, duration=0).move_to_element_with_offset(element(page, "canvas"), x, y).perform()
    page.settle()
    return ActionChains(page, duration=0)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 800, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_without_complaint_and_asks_nobody(
    opened: Browser, made: tuple[Path, PredictedStep], width: int, scheme: str
) -> None:
    file, prediction = made
    opened.show(file, width=width, scheme=scheme)
    assert opened.complaints() == []
    assert {url for url in opened.requests() if not url.startswith("data:")} == {file.as_uri()}
    assert opened.find_element(By.CSS_SELECTOR, ".step strong").text == time_ms(prediction.step_time_ms)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width, "the page does not scroll sideways"


@pytest.mark.slow
def test_the_timeline_is_drawn(page: Browser) -> None:
    assert page.execute_script(COLOURS) > 12
    for family in ("communication", "embedding", "matmul", "host"):
        assert page.execute_script(LONGEST, family)[0] > 1, family


@pytest.mark.slow
def test_a_page_opens_on_what_devices_do(page: Browser) -> None:
    opened = visible(page)
    press(page, "0")
    whole = visible(page)
    assert whole[0] == 0 < opened[0] < opened[1] <= whole[1]
    press(page, "d")
    assert visible(page) == opened


@pytest.mark.slow
def test_keys_zoom_move_and_fit(page: Browser) -> None:
    press(page, "0")
    whole = visible(page)
    press(page, "++")
    near = visible(page)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 1.5**2, rel=1e-3)
    press(page, Keys.ARROW_RIGHT)
    later = visible(page)
    assert later[0] > near[0]
    assert later[1] - later[0] == pytest.approx(near[1] - near[0], rel=1e-3)
    press(page, Keys.ARROW_LEFT + "-")
    assert visible(page)[1] - visible(page)[0] > near[1] - near[0]
    press(page, "0")
    assert visible(page) == whole


@pytest.mark.slow
def test_buttons_zoom_as_keys_do(page: Browser) -> None:
    element(page, "fit").click()
    whole = visible(page)
    element(page, "in").click()
    near = visible(page)
    assert near[1] - near[0] < whole[1] - whole[0]
    element(page, "out").click()
    assert visible(page) == whole


@pytest.mark.slow
def test_nothing_zooms_beyond_the_whole(page: Browser) -> None:
    element(page, "fit").click()
    whole = visible(page)
    press(page, "---" + Keys.ARROW_RIGHT * 3 + Keys.ARROW_LEFT)
    assert visible(page) == whole


@pytest.mark.slow
def test_the_wheel_zooms_at_the_pointer_and_dragging_moves(page: Browser) -> None:
    whole, stage = visible(page), element(page, "stage")
    page.execute_script(
        'const box = canvas.getBoundingClientRect(); byId("stage").dispatchEvent(new WheelEvent("wheel", '
        "{ deltaY: -300, ctrlKey: true, clientX: box.right, clientY: box.top + 60, bubbles: true, cancelable: true }))"
    )
    near = visible(page)
    assert near[1] == pytest.approx(whole[1], abs=0.01)
    assert near[0] > whole[0]
    ActionChains(page, duration=0).move_to_element(stage).click_and_hold().move_by_offset(200, 0).release().perform()
    assert visible(page)[0] < near[0]


@pytest.mark.slow
def test_dragging_along_the_scale_zooms_into_the_stretch(page: Browser) -> None:
    whole, stage = visible(page), element(page, "stage")
    height, width = stage.size["height"], stage.size["width"]
    start = ActionChains(page, duration=0).move_to_element_with_offset(stage, 0, 12 - height // 2)
    start.click_and_hold().move_by_offset(width // 4, 0).release().perform()
    near = visible(page)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 4, rel=0.15)


@pytest.mark.slow
def test_pointing_at_a_bar_says_what_it_is(page: Browser) -> None:
    tip = element(page, "tip")
    assert not tip.is_displayed()
    point_at(page, "communication")
    assert tip.is_displayed()
    assert "all_to_all" in tip.text or "all_reduce" in tip.text
    assert " ms" in tip.text
    assert "rank " in tip.text


@pytest.mark.slow
def test_a_chosen_bar_stays_and_keys_go_on_from_it(page: Browser) -> None:
    point_at(page, "embedding").click().perform()
    chosen = element(page, "chosen")
    assert "Family\nembedding" in chosen.text
    begins = chosen.text
    press(page, ".")
    assert chosen.text != begins
    press(page, ",")
    assert chosen.text == begins
    press(page, Keys.ESCAPE)
    assert chosen.text == ""


@pytest.mark.slow
def test_searching_counts_and_lets_the_rest_fade(page: Browser) -> None:
    before = {family: page.execute_script(LONGEST, family)[0] for family in ("matmul", "embedding")}
    element(page, "query").send_keys("EMBEDDING_bag")
    page.settle()
    assert " found, " in element(page, "found").text
    assert page.execute_script(LONGEST, "embedding")[0] >= before["embedding"]
    assert page.execute_script(LONGEST, "matmul")[0] == 0 < before["matmul"]
    element(page, "query").send_keys(Keys.ENTER)
    assert element(page, "found").text.startswith("1 of ")
    assert "embedding_bag" in element(page, "chosen").text
    element(page, "query").send_keys("nothing is called this")
    assert element(page, "found").text == "no match"


@pytest.mark.slow
def test_one_family_can_be_looked_at_alone(page: Browser) -> None:
    button = page.find_element(By.XPATH, "//p[@id='legend']/button[.='matmul']")
    button.click()
    page.settle()
    assert button.get_attribute("aria-pressed") == "true"
    assert page.execute_script(LONGEST, "embedding")[0] == 0 < page.execute_script(LONGEST, "matmul")[0]
    press(page, Keys.ESCAPE)
    assert button.get_attribute("aria-pressed") == "false"


@pytest.mark.slow
def test_a_name_of_the_critical_path_is_found_on_the_timeline(page: Browser, made: tuple[Path, PredictedStep]) -> None:
    name = made[1].critical_path.top[0].name
    page.find_element(By.CSS_SELECTOR, ".find").click()
    assert element(page, "query").get_attribute("value") == name
    assert " found" in element(page, "found").text


@pytest.mark.slow
def test_the_critical_path_and_host_threads_can_be_left_out(page: Browser) -> None:
    with_path = page.execute_script(LONGEST, "path")[0]
    press(page, "p")
    assert page.execute_script(LONGEST, "path")[0] < with_path
    height = element(page, "stage").size["height"]
    press(page, "h")
    assert page.execute_script(LONGEST, "host")[0] == 0
    assert element(page, "stage").size["height"] < height


@pytest.mark.slow
def test_dark_and_light_differ_and_the_button_changes_them(page: Browser) -> None:
    def paper() -> list[str]:
        drawn = (
            "const d = canvas.getContext('2d').getImageData(canvas.width - 4, 40, 1, 1).data; return [d[0], d[1], d[2]].join()"
        )
        return [page.execute_script("return getComputedStyle(document.body).backgroundColor"), page.execute_script(drawn)]

    light = paper()
    element(page, "theme").click()
    page.settle()
    dark = paper()
    assert all(one != other for one, other in zip(light, dark, strict=True))
    page.prefer("dark")
    page.refresh()
    page.settle()
    assert paper()[0] == dark[0]


@pytest.mark.slow
def test_a_question_mark_opens_the_help_and_escape_closes_it(page: Browser) -> None:
    press(page, "?")
    assert element(page, "help").is_displayed()
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    assert not element(page, "help").is_displayed()


@pytest.mark.slow
def test_everything_can_be_reached_by_tab_and_the_focus_is_seen(page: Browser) -> None:
    page.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    reached = set()
    for _ in range(60):
        ActionChains(page, duration=0).send_keys(Keys.TAB).perform()
        focused = page.switch_to.active_element
        reached.add(focused.get_attribute("id"))
        if focused.get_attribute("id") == "stage":
            assert page.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert {"theme", "ask", "query", "hosts", "highlight", "in", "out", "devices", "fit", "stage"} <= reached


def crowded(prediction: PredictedStep) -> PredictedStep:
    """The same step on devices with a gigabyte, of which it needs three."""
    rank = {
        "rank": 0,
        "peak_bytes": 3 * 2**30,
        "allocated_bytes": 2**30,
        "reserved_bytes": 2**31,
        "parts": {"activations": 2**30},
    }
    memory = {**rank, "capacity_bytes": 2**30, "fits": False, "ranks": [rank]}
    return replace(prediction, memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["fits", "does not fit", "diff"])
def test_text_can_be_read(opened: Browser, made: tuple[Path, PredictedStep], tmp_path: Path, kind: str, scheme: str) -> None:
    """Contrast of at least 4.5 to 1 (WCAG 2.2), of pages with and without a script."""
    file, prediction = tmp_path / "page.html", made[1]
    if kind == "diff":
        steptime.diff(EXAMPLE, EXAMPLE, after_platform="4xh200-quarter-loopback").html(file)
    else:
        Prediction.of(crowded(prediction) if kind == "does not fit" else prediction).html(file)
    opened.show(file, scheme=scheme)
    assert opened.execute_script(CONTRAST) == []
    assert opened.complaints() == []
    opened.prefer("light")


@pytest.mark.slow
def test_a_page_without_a_script_changes_its_colours_too(opened: Browser, tmp_path: Path) -> None:
    file = tmp_path / "diff.html"
    steptime.diff(EXAMPLE, EXAMPLE).html(file)

    def paper() -> str:
        return str(opened.execute_script("return getComputedStyle(document.body).backgroundColor"))

    seen = []
    for scheme in ("light", "dark"):
        opened.show(file, scheme=scheme)
        before = paper()
        element(opened, "theme").click()
        seen.append((before, paper()))
        assert opened.execute_script(CONTRAST) == []
    assert seen[0] == seen[1][::-1]
    assert seen[0][0] != seen[0][1]
    opened.prefer("light")


@pytest.mark.slow
def test_what_does_not_fit_is_what_one_sees_first(opened: Browser, made: tuple[Path, PredictedStep], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    Prediction.of(crowded(made[1])).html(file)
    opened.show(file)
    seen = element(opened, "verdict")
    assert seen.is_displayed() and seen.rect["y"] < 200
    assert seen.text.startswith("Does not fit by 2 GiB")
    sizes = opened.execute_script(
        "return [...document.querySelectorAll('main *')].map((one) => parseFloat(getComputedStyle(one).fontSize))"
    )
    largest = opened.execute_script("return parseFloat(getComputedStyle(document.querySelector('#verdict strong')).fontSize)")
    assert largest == max(sizes)


@pytest.mark.slow
def test_hostile_names_are_shown_as_text(opened: Browser, tmp_path: Path) -> None:
    prediction, workload = hostile()
    file = tmp_path / "hostile.html"
    Prediction.of(replace(prediction, workload=workload)).html(file)
    opened.show(file)
    assert opened.complaints() == []
    assert opened.title == f"{clean(HOSTILE[1])} · steptime"
    shown = [one.text for one in opened.find_elements(By.CSS_SELECTOR, ".warnings li")]
    assert shown == [" ".join(clean(name).split()) for name in HOSTILE]
    assert opened.find_elements(By.CSS_SELECTOR, "main img, main script, svg[onload]") == []
    for _ in HOSTILE:
        press(opened, ".")
        assert any(clean(name)[:20] in element(opened, "chosen").text for name in HOSTILE)
    assert opened.complaints() == []
    assert opened.title != "owned"
