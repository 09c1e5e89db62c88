"""Take screenshots of the dev page, run axe-core on it, measure the drawing time.

    npm run dev && python dev/look.py FOLDER

Needs playwright and Debian's chromium. Prints problems and exits with status 1 if there are any.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
AXE = HERE.parent / "node_modules" / "axe-core" / "axe.min.js"
SCENES = ("gpu", "cpu", "nodes", "empty", "dead", "hostile")
MIDDLE = 900
"""Usual width of a notebook in pixels; only full-page screenshots at this width."""
LOOKS = [(1400, ""), (1400, "&dark"), (MIDDLE, ""), (480, ""), (480, "&dark")]
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def violations(page: Page) -> list[str]:
    """Return the violations that axe-core reports for the page."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {preload: false})")["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:160]}" for one in found]


def look(page: Page, out: Path) -> list[str]:
    """Take a screenshot of each scene at each width and theme. Return the problems."""
    wrong: list[str] = []
    page.on("console", lambda told: told.type == "error" and wrong.append(told.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    for scene in SCENES:
        for width, theme in LOOKS:
            name = f"{scene}-{width}{theme.replace('&', '-')}"
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(f"file://{HERE}/index.html?scene={scene}{theme}")
            page.wait_for_selector(".nbdist[data-link=live]")
            page.wait_for_timeout(150)
            page.screenshot(path=out / f"{name}.png", full_page=True)
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            wrong += [f"{name}: {wide} px too wide"] if wide > 0 else []
            if width == MIDDLE:
                continue
            for tab in page.query_selector_all("[role=tab]"):
                tab.click()
                wrong += [f"{name}: {one}" for one in violations(page)]
                part = str(tab.evaluate("tab => tab.firstChild.data")).lower()
                page.screenshot(path=out / f"{name}-{part}.png", full_page=True)
    page.goto(f"file://{HERE}/index.html?bench")
    print(page.wait_for_selector("#bench").inner_text())
    return wrong


def main() -> int:
    """Run the script."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        wrong = look(browser.new_page(), out)
        browser.close()
    print("\n".join(dict.fromkeys(wrong)) or "nothing wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
