"""A headless Chromium for tests of pages, controlled by Playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser, or skip the test if there is none. ``RAYSTOW_CHROMIUM`` names one, ``make chromium`` downloads one."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: make venv")
    with api.sync_playwright() as playwright:
        found = [os.environ.get("RAYSTOW_CHROMIUM"), *map(shutil.which, _NAMES), playwright.chromium.executable_path]
        executable = next((path for path in found if path and os.path.exists(path)), None)
        if executable is None:
            pytest.skip("no Chromium here: make chromium")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])  # Chromium as root has no sandbox
        try:
            yield browser
        finally:
            browser.close()
