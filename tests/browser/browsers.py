"""A browser without a window, of this machine; tests that need one are skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

needs_browser = pytest.mark.skipif(
    BINARY is None or DRIVER is None, reason="no Chromium with its driver here: install chromium and chromium-driver"
)

# As root, in a container or with little shared memory Chromium starts only with these; and no name leads anywhere but here.
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

# Texts whose contrast is below 4.5; those that are disabled or hidden aside.
CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgb = (colour, under) => {
  canvas.clearRect(0, 0, 1, 1);
  if (under) { canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1); }
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
};
const light = (data) => {
  const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = [...data].slice(0, 3).map((part) => linear(part / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!text || !element.checkVisibility() || element.closest(".spoken, script, :disabled, option")) continue;
  let back = element, colour = "";
  while (back && !(colour && rgb(colour)[3] === 255)) {
    colour = getComputedStyle(back).backgroundColor;
    back = back.parentElement;
  }
  const [a, b] = [light(rgb(getComputedStyle(element).color, colour)), light(rgb(colour))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const shown = `${element.tagName} ${element.className} ${element.textContent.slice(0, 30)}`;
  if (ratio < 4.5) found.push(`${shown}: ${ratio.toFixed(2)}`);
}
return found;
"""


class Browser(webdriver.Chrome):
    """Chromium that can be asked about a page."""

    def show(self, file: Path, *, width: int = 1400, height: int = 900, scheme: str = "light") -> None:
        """Open a file at this size, as a person who prefers this colour scheme, and wait until it is drawn."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.prefer(scheme)
        self.complaints(), self.requests()
        self.get(file.as_uri())
        self.settle()

    def prefer(self, scheme: str) -> None:
        """Be the browser of a person who prefers this colour scheme, and no motion."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def settle(self) -> None:
        """Wait for what was asked to be drawn: two frames, because the first may have begun before."""
        frames = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        self.execute_async_script(frames)

    def complaints(self) -> list[str]:
        """What the browser's console says since it was asked last."""
        return [entry["message"] for entry in self._log("browser")]

    def requests(self) -> list[str]:
        """What was requested since that was asked last."""
        messages: list[dict[str, Any]] = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]

    def _log(self, name: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.get_log(name)  # type: ignore[no-untyped-call]
        return found


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, ended with the context."""
    options = webdriver.ChromeOptions()
    options.binary_location = BINARY or ""
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = Browser(options=options, service=Service(DRIVER))
    try:
        yield opened
    finally:
        opened.quit()
