"""Shared by tests of the page: models to show, a browser page that must stay silent, and readers of it."""

import re
import time
from contextlib import contextmanager
from urllib.parse import urlencode

import numpy as np
import pytest

from sinkdlm.analysis.capture import capture
from sinkdlm.sampling import requests_of
from sites import PROMPT, SECONDS, bytes_lm, nasty_lm, sharp_lm

WAIT = 1000 * SECONDS
ASKED = {"prompt": PROMPT, "model": "plain", "beside": "sunk", "policy": "llada", "steps": 6, "length": 20, "seed": 1}
SHOWN = "document.querySelectorAll('dd[data-quantity=sink_heads]').length === {}"
LOOKED = "[...document.querySelectorAll('.detail:not([hidden]) .looks')].filter(one => one.textContent).length === {}"
BYTE = 0.5 / 255  # quantisation: half a step of a scale that is at most 1


@contextmanager
def opened(browser, url, *, said=None, **options):
    """Open a page that must log nothing, contact no other host, and open no dialog."""
    with browser.new_context(viewport={"width": 1440, "height": 900}, **options) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda failure: page.said.append(str(failure)))
        page.on("dialog", lambda dialog: (page.said.append("a dialog"), dialog.dismiss()))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(url)
        yield page
        assert [words for words in page.said if not (said and said in words)] == []


def until(page, condition, arg=None):
    """Poll a condition: the browser's own wait evaluates text, which the page's policy forbids."""
    deadline = time.monotonic() + SECONDS
    while not page.evaluate(condition, arg):
        assert time.monotonic() < deadline, f"still not: {condition}; the page says {page.said}, {page.text_content('#notice')}"
        page.wait_for_timeout(10)


def address(site, **more):
    return f"{site.url}/#{urlencode({**ASKED, **more})}"


def finished(page, sides=2):
    until(page, SHOWN.format(sides))
    return page


def looked(page, sides=2):
    """Wait for the chosen token's details. Candidates are no sign: the last token's stay until then."""
    until(page, LOOKED.format(sides))


def open_file(page, path, sides=2):
    """Open a file and wait until it is shown: the text before may look the same."""
    page.evaluate("document.querySelectorAll('article.side').forEach(one => one.classList.add('before'))")
    page.set_input_files("#open", path)
    until(page, "!document.querySelector('article.side.before')")
    finished(page, sides)


def side(page, name):
    return page.locator("article.side").filter(has=page.locator("h2", has_text=re.compile(f"^{name}$")))


def texts(page, name):
    return side(page, name).locator(".cell:not(.own)").all_text_contents()


def quantity(page, name, what):
    return said_by(side(page, name).locator(f"> dl dd[data-quantity={what}]"))


def scrub(page, step):
    page.evaluate("step => Object.assign(document.querySelector('#step'), {value: step}).dispatchEvent(new Event('input'))", step)


def said_by(locator):
    """Return a locator's text, with plain instead of non-breaking spaces."""
    return locator.text_content().replace("\xa0", " ")


def shown_lms():
    return {"plain": sharp_lm(n_sinks=0), "sunk": sharp_lm(n_sinks=1), "nasty": nasty_lm(), "bytes": bytes_lm()}


def trajectory_of(lm, **more):
    ids = lm.tokenizer.encode(PROMPT, add_special_tokens=False)
    length = len(ids) + ASKED["length"]
    given = {"mask_id": lm.config.mask_id, "length": length, "config": "llada", "steps": ASKED["steps"], "seed": ASKED["seed"]}
    return next(capture(lm.model, requests_of([ids], **{**given, **more})))


def shown_number(text):
    return None if text == "n/a" else float(text.removesuffix(" %")) / (100 if text.endswith("%") else 1)


def assert_shown(text, value, tolerance):
    """Compare to the shown digits, plus at most the quantisation error."""
    if np.isnan(value):
        assert text == "n/a"
        return
    digits = len(text.removesuffix(" %").partition(".")[2])
    half = 0.5 * 10**-digits / (100 if text.endswith("%") else 1)
    assert shown_number(text) == pytest.approx(value, abs=half + tolerance + 1e-9)
