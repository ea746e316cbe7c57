"""`steptime explore` in a real browser: every control, wrong values, two tabs, a server that ends and returns, the keyboard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait
from tests.browser.browsers import CONTRAST, Browser, browser, needs_browser

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
TOKEN = "the-token-of-a-browser-test"  # noqa: S105 (of a server that lives for a test)
PATIENCE_S = 120  # of machines that do much else

pytestmark = [needs_browser, pytest.mark.slow]

SETTLED = """
const quiet = document.getElementById("answer").getAttribute("aria-busy") === "false";
return quiet && !document.body.matches(".stale:not(.impossible)") && document.querySelector("#command code").textContent !== "";
"""


class Server:
    """`steptime explore` as a person starts it."""

    def __init__(self, *arguments: str, port: int = 8400, token: str = "") -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "STEPTIME_EXPLORE_TOKEN": token}
        command = [sys.executable, "-m", "steptime", "explore", *arguments, "--no-browser", "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        with self.process.stdout as said:
            self.address = said.readline().strip()
            said.readline()  # how to end it: who goes before would break the pipe

    @property
    def port(self) -> int:
        return int(self.address.split(":")[2].split("/")[0])

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout=20)


def wait(page: Browser, until: Callable[[], object]) -> None:
    WebDriverWait(page, PATIENCE_S, poll_frequency=0.05).until(lambda _: until())


def settle(page: Browser) -> None:
    """Until the answer is of what is set."""
    wait(page, lambda: page.execute_script(SETTLED))


def opened(page: Browser, server: Server) -> Browser:
    page.get("about:blank")
    page.get(server.address)
    settle(page)
    return page


def control(page: Browser, name: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, f'[data-name="{name}"]')


def command(page: Browser) -> str:
    return page.find_element(By.CSS_SELECTOR, "#command code").text


def step_ms(page: Browser) -> float:
    return float(page.find_element(By.CSS_SELECTOR, "#summary .step strong").text.replace(",", ""))


def type_in(box: WebElement, text: str) -> None:
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(text, Keys.TAB)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        found.set_script_timeout(PATIENCE_S)
        found.prefer("light")
        metrics = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        found.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        yield found


@pytest.fixture(scope="module", params=["gpt2.toml", "dlrm_small.toml"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    running = Server(str(CONFIGS / request.param), "--platform", "2xh200-nvlink")
    yield running
    assert running.end() == 130


def test_every_control_moves_the_answer_or_says_why_not(chromium: Browser, server: Server) -> None:
    page = opened(chromium, server)
    page.execute_script("for (const each of document.querySelectorAll('#controls details')) each.open = true")
    described: list[dict[str, Any]] = page.execute_async_script(
        "const headers = { 'x-steptime-token': sessionStorage.getItem('steptime-token') };"
        "fetch('/api/controls', { headers }).then((found) => found.json()).then((found) => arguments[0](found.controls))"
    )
    before = command(page)
    assert len(described) > 15
    for one in described:
        element = control(page, one["name"])
        assert one["label"] in element.find_element(By.TAG_NAME, "label").text
        _change(element, one)
        settle(page)
        wrong = element.find_element(By.CLASS_NAME, "wrong")
        assert command(page) != before or (wrong.is_displayed() and wrong.text), one["name"]
        element.find_element(By.CSS_SELECTOR, ".head .back").click()
        settle(page)
        assert command(page) == before and not wrong.is_displayed()
    assert not [each for each in page.complaints() if " 422 " not in each]  # what cannot be is refused, which it logs


def _change(element: WebElement, one: dict[str, Any]) -> None:
    """Another value, by the means a person has."""
    if one["kind"] == "choice":
        chosen = Select(element.find_element(By.TAG_NAME, "select"))
        now = chosen.first_selected_option.get_attribute("value")
        chosen.select_by_value(next(value for value, _ in one["choices"] if value != now))
    elif one["kind"] == "switch":
        element.find_element(By.CSS_SELECTOR, "input[type=checkbox]").click()
    elif one["kind"] == "changes":
        element.find_element(By.CSS_SELECTOR, "input[type=text]").send_keys("matmul * 0.5", Keys.ENTER)
    else:
        sliders = element.find_elements(By.CSS_SELECTOR, "input[type=range]")
        if sliders:
            sliders[0].send_keys(Keys.ARROW_RIGHT)
        else:
            type_in(element.find_element(By.CSS_SELECTOR, "input[type=number]"), str((one["value"] or 0) + 1))


def test_a_slider_moves_the_step_and_the_page_says_the_command_that_gives_it(chromium: Browser, server: Server) -> None:
    page = opened(chromium, server)
    before = step_ms(page)
    control(page, "batch").find_element(By.CSS_SELECTOR, "input[type=range]").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    settle(page)
    assert step_ms(page) > before
    words = command(page).split()
    predicted = subprocess.run(
        [sys.executable, "-m", *words, "--json"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert json.loads(predicted.stdout)["step_time_ms"] == pytest.approx(step_ms(page), abs=6e-2)


def test_a_wrong_value_is_named_beside_its_control_and_the_last_answer_stays(chromium: Browser, server: Server) -> None:
    page = opened(chromium, server)
    before, batch = step_ms(page), control(page, "batch")
    for text in ("0", "-3", "1e99"):
        type_in(batch.find_element(By.CSS_SELECTOR, "input[type=number]"), text)
        wait(page, lambda: batch.find_element(By.CLASS_NAME, "wrong").is_displayed())
        settle(page)
        assert "expected" in batch.find_element(By.CLASS_NAME, "wrong").text
        assert step_ms(page) == before
        assert "last" in page.find_element(By.ID, "status").text
        assert batch.find_element(By.TAG_NAME, "input").get_attribute("aria-invalid") == "true"
    changes = control(page, "what_if")
    page.find_element(By.ID, "reset").click()
    settle(page)
    changes.find_element(By.CSS_SELECTOR, "input[type=text]").send_keys("<b>nothing</b> * 2", Keys.ENTER)
    wait(page, lambda: changes.find_element(By.CLASS_NAME, "wrong").is_displayed())
    assert "<b>nothing</b>" in changes.find_element(By.CLASS_NAME, "wrong").text
    page.find_element(By.ID, "reset").click()
    settle(page)
    assert step_ms(page) == before


def test_changes_that_would_help_are_tried_and_taken(chromium: Browser, server: Server) -> None:
    page = opened(chromium, server)
    before, changes = step_ms(page), control(page, "what_if")
    changes.find_element(By.CLASS_NAME, "suggest").click()
    wait(page, lambda: changes.find_elements(By.CSS_SELECTOR, ".suggestions button"))
    changes.find_element(By.CSS_SELECTOR, ".suggestions button").click()
    settle(page)
    assert "--what-if" in command(page) and step_ms(page) < before
    changes.find_element(By.CSS_SELECTOR, ".chips button").click()
    settle(page)
    assert step_ms(page) == before


def test_names_of_the_critical_path_are_found_in_the_timeline(chromium: Browser, server: Server) -> None:
    page = opened(chromium, server)
    named = page.find_element(By.CSS_SELECTOR, "#path [data-find]")
    page.execute_script("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", named)
    named.click()
    assert page.find_element(By.ID, "query").get_attribute("value") == named.text
    assert "found" in page.find_element(By.ID, "found").text
    page.find_element(By.ID, "query").send_keys(Keys.ESCAPE)
    assert page.find_element(By.ID, "found").text == ""


def test_two_tabs_do_not_disturb_each_other(chromium: Browser, server: Server) -> None:
    page = opened(chromium, server)
    first, before = page.current_window_handle, step_ms(page)
    page.switch_to.new_window("tab")
    try:
        opened(page, server)
        control(page, "batch").find_element(By.CSS_SELECTOR, "input[type=range]").send_keys(*[Keys.ARROW_RIGHT] * 3)
        page.switch_to.window(first)
        control(page, "host_factor").find_element(By.CSS_SELECTOR, "input[type=range]").send_keys(*[Keys.ARROW_RIGHT] * 3)
        settle(page)
        assert "--batch" not in command(page) and "host *" in command(page)
        page.switch_to.window(page.window_handles[-1])
        settle(page)
        assert "--batch" in command(page) and "host *" not in command(page) and step_ms(page) != before
    finally:
        page.switch_to.window(page.window_handles[-1])
        page.close()
        page.switch_to.window(first)


def test_variants_are_saved_shown_again_and_removed(chromium: Browser, server: Server) -> None:
    page = opened(chromium, server)
    page.find_element(By.ID, "save").click()
    slower = control(page, "wire_factor" if "dlrm" in command(page) else "host_factor")
    slower.find_element(By.CSS_SELECTOR, "input[type=range]").send_keys(Keys.END)
    settle(page)
    page.find_element(By.ID, "save").click()
    saved = page.find_elements(By.CSS_SELECTOR, "#saved .variants li")
    assert len(saved) == 2 and "takes 4" in saved[1].text
    wait(page, lambda: "against the first" in page.find_element(By.CSS_SELECTOR, "#saved .compared").text)
    assert "What differs" in page.find_element(By.CSS_SELECTOR, "#saved .compared").text
    saved[0].find_element(By.TAG_NAME, "button").click()
    settle(page)
    assert "what-if" not in command(page)
    page.refresh()
    settle(page)
    assert len(page.find_elements(By.CSS_SELECTOR, "#saved .variants li")) == 2
    for _ in range(2):
        page.find_element(By.CSS_SELECTOR, "#saved .variants .back").click()
    assert not page.find_element(By.ID, "saved").is_displayed()


def test_a_step_that_does_not_fit_fits_with_a_remedy_applied(chromium: Browser) -> None:
    server = Server(str(CONFIGS / "gpt2-ddp.toml"), "--platform", "8xh100-nvlink")
    page = opened(chromium, server)
    type_in(control(page, "batch").find_element(By.CSS_SELECTOR, "input:not([type=range])"), "8192")
    settle(page)
    summary = page.find_element(By.ID, "summary")
    assert summary.text.startswith("Does not fit")
    assert "If there were room\nSamples/s" in summary.text
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#summary .helps button"))
    page.find_element(By.CSS_SELECTOR, "#summary .helps button").click()
    settle(page)
    assert summary.text.startswith("Fits")
    assert "\nResult\n" not in summary.text
    fits = command(page)
    page.refresh()
    settle(page)
    assert command(page) == fits
    assert "--set" in fits
    assert "token" not in page.current_url
    assert server.end() == 130


def test_the_keyboard_reaches_everything_and_shows_where_it_is(chromium: Browser, server: Server) -> None:
    page = opened(chromium, server)
    page.find_element(By.TAG_NAME, "body").send_keys(Keys.HOME)
    seen: list[str] = []
    for _ in range(200):
        page.switch_to.active_element.send_keys(Keys.TAB)
        found = page.execute_script(
            "const at = document.activeElement, style = getComputedStyle(at);"
            "return [at.id || at.className, style.outlineStyle, at.closest('[data-name]')?.dataset.name ?? ''];"
        )
        if found[0] == "explore":  # the page itself: around the end
            break
        assert found[1] != "none", found
        seen += [found[0], found[2]]
    for name in ("reset", "theme", "batch", "ranks", "platform", "power_cap_w", "what_if", "save", "copy", "stage"):
        assert name in seen, (name, seen)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(chromium: Browser, server: Server, scheme: str) -> None:
    """Contrast of at least 4.5 to 1 (WCAG 2.2), of all text on the background it stands on."""
    chromium.prefer(scheme)
    page = opened(chromium, server)
    faint: list[str] = page.execute_script(CONTRAST)
    chromium.prefer("light")
    assert not faint


def test_a_server_that_ends_is_missed_and_found_again(chromium: Browser) -> None:
    arguments = (str(CONFIGS / "dlrm_small.toml"), "--platform", "2xh200-nvlink")
    first = Server(*arguments, port=8500, token=TOKEN)
    page = opened(chromium, first)
    before = step_ms(page)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    control(page, "batch").find_element(By.CSS_SELECTOR, "input[type=range]").send_keys(Keys.ARROW_RIGHT)
    wait(page, lambda: page.find_element(By.ID, "gone").is_displayed())
    assert step_ms(page) == before
    again = Server(*arguments, port=first.port, token=TOKEN)
    try:
        assert again.port == first.port
        wait(page, lambda: not page.find_element(By.ID, "gone").is_displayed())
        settle(page)
        assert "--batch" in command(page) and step_ms(page) != before
    finally:
        assert again.end() == 130
    another = Server(*arguments, port=first.port)
    try:
        wait(page, lambda: "token" in page.find_element(By.ID, "gone").text)
    finally:
        another.end()


def test_a_taken_port_gives_the_next_one_and_an_interrupt_leaves_nothing() -> None:
    arguments = (str(CONFIGS / "dlrm_small.toml"), "--platform", "2xh200-nvlink")
    first = Server(*arguments, port=8600)
    second = Server(*arguments, port=first.port)
    assert second.port == first.port + 1
    time.sleep(1)
    children = [_children(each.process.pid) for each in (first, second)]
    assert all(len(each) == 2 for each in children)
    assert [each.end() for each in (first, second)] == [130, 130]
    time.sleep(0.5)
    assert not [pid for each in children for pid in each if Path(f"/proc/{pid}").exists()]


def test_processes_of_a_killed_server_end_by_themselves() -> None:
    server = Server(str(CONFIGS / "dlrm_small.toml"), "--platform", "2xh200-nvlink", port=8700)
    time.sleep(1)
    children = _children(server.process.pid)
    server.end(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in children):
        time.sleep(0.1)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_a_recording_has_the_controls_that_apply_and_says_why_of_the_others(chromium: Browser) -> None:
    recording = Server(str(ROOT / "examples" / "dlrm_overlap4"), port=8800)
    try:
        page = opened(chromium, recording)
        batch = control(page, "batch")
        assert not batch.find_element(By.CSS_SELECTOR, "input[type=number]").is_enabled()
        assert "recording" in batch.find_element(By.CLASS_NAME, "reason").text
        before = step_ms(page)
        Select(control(page, "platform").find_element(By.TAG_NAME, "select")).select_by_value("8xh200-nvlink")
        settle(page)
        assert "--platform 8xh200-nvlink" in command(page) and step_ms(page) != before
        page.find_element(By.ID, "reset").click()
        settle(page)
        assert step_ms(page) == before
    finally:
        assert recording.end() == 130
