"""Pages in a real headless browser, Debian's chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=2000",
    "--window-size=1100,900",
)
_PROBE = "probe-of-the-tests"


def evaluated(page: Path, expression: str, folder: Path) -> Any:
    """The JSON value of a JavaScript expression in a loaded page.

    The page is loaded from a copy behind which a script stands, which leaves the value in the document.

    Args:
        page: HTML file.
        folder: empty, for the copy and the browser's profile.
    """
    assert CHROMIUM is not None
    script = (
        "<script>addEventListener('load', () => { const found = document.createElement('pre');"
        f" found.id = '{_PROBE}'; found.textContent = JSON.stringify({expression}); document.body.append(found); }})"
        "</script>"
    )
    copy = folder / "copy.html"
    copy.write_text(page.read_text(encoding="utf-8") + script, encoding="utf-8")
    dom = _run("--dump-dom", copy, folder)
    found = re.search(rf'<pre id="{_PROBE}">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


def screenshot(page: Path, picture: Path, folder: Path) -> bytes:
    """The PNG of a page as it looks."""
    _run(f"--screenshot={picture}", page, folder)
    return picture.read_bytes()


def _run(what: str, page: Path, folder: Path) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", what, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
