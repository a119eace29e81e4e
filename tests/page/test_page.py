"""The page in a real browser: its functions, its numbers against the analysis, escaping of text, and failures."""

import json
import re
from urllib.parse import parse_qs, urlencode

import httpx
import numpy as np
import pytest

from pages import (
    ASKED,
    BYTE,
    address,
    assert_shown,
    finished,
    looked,
    opened,
    quantity,
    said_by,
    scrub,
    side,
    texts,
    trajectory_of,
    until,
)
from sinkdlm.analysis.capture import attention_maps
from sinkdlm.analysis.metrics import measure
from sinkdlm.analysis.recording import look_at
from sinkdlm.page.bundle import PAGE
from sinkdlm.serving.engine import Capacity
from sites import NASTY, PROMPT, SECONDS, serving, sharp_lm

ADDRESSED = """() => {  // the address has been written for what is shown
  const given = new URLSearchParams(location.hash.slice(1)), chosen = document.querySelector('.cell[aria-selected=true]');
  return chosen && given.get('step') === document.querySelector('#step').value && given.get('token') === chosen.dataset.place;
}"""


NOTED = """() => {  // every notice from now on
  const words = document.querySelector('#notice p');
  window.noted = [];
  new MutationObserver(() => noted.push(words.textContent)).observe(words, {childList: true});
}"""


def hash_of(page):
    """The address once it has been written for what is shown."""
    return {name: values[0] for name, values in parse_qs(page.evaluate("location.hash.slice(1)")).items()}


# -- what it does -----------------------------------------------------------------------------------------------------------------


def test_one_writes_scrubs_chooses_compares_and_reloads(browser, site):
    with opened(browser, site.url) as page:
        until(page, "document.querySelector('#left').options.length === 4")
        page.fill("#prompt", PROMPT)
        page.select_option("#left", "plain")
        page.select_option("#right", "sunk")
        page.select_option("#steps", "8")
        page.fill("#length", "20")
        page.fill("#seed", "5")
        page.click("#write")
        finished(page)
        assert page.text_content("#step-said") == "finished"
        written = texts(page, "plain")
        assert len(written) == len(texts(page, "sunk")) == len(PROMPT) + 20
        assert "·" not in written

        scrub(page, 3)
        assert page.text_content("#step-said") == "step 3 of 8"
        assert texts(page, "plain").count("·") == texts(page, "sunk").count("·") > 5
        page.click("#forth")
        page.click("#back")
        page.click("#back")
        assert page.text_content("#step-said") == "step 2 of 8"
        scrub(page, 6)
        page.click("#play")
        until(page, "document.querySelector('#step-said').textContent === 'finished'")
        assert page.get_attribute("#play", "aria-label") == "Play"

        page.select_option("#layer", "1")
        page.select_option("#head", "1")
        side(page, "sunk").locator(".heads canvas").click(position={"x": 32, "y": 16})
        assert (page.input_value("#layer"), page.input_value("#head")) == ("0", "1")
        side(page, "sunk").locator(".heads canvas").click(position={"x": 500, "y": 5})
        assert (page.input_value("#layer"), page.input_value("#head")) == ("1", "0")
        page.click("#back")
        side(page, "plain").locator(".cell").nth(9).click()
        looked(page)
        for name in ("plain", "sunk"):  # the same controls move both
            detail = side(page, name).locator(".detail")
            assert detail.locator(".candidates li").count() == 5
            assert detail.locator("h3").text_content().endswith("at 9")
            assert said_by(detail.locator(".looks")).startswith("It attends most to: ")
        side(page, "sunk").locator(".cell.own").click()
        assert "nothing but itself" in side(page, "sunk").locator(".detail").text_content()
        side(page, "sunk").locator(".trace canvas").first.click(position={"x": 300, "y": 20})
        until(page, ADDRESSED)
        before = hash_of(page), texts(page, "plain"), texts(page, "sunk"), quantity(page, "plain", "top_received")
        assert before[0]["seed"] == "5"
        assert before[0]["layer"] == "1"

        page.reload()
        finished(page)
        page.wait_for_selector(".cell[aria-selected=true]")
        after = hash_of(page), texts(page, "plain"), texts(page, "sunk"), quantity(page, "plain", "top_received")
        assert after == before
        assert {url.partition("/page")[0].partition("/v1")[0].rstrip("/") for url in page.asked if "blob:" not in url} == {site.url}


@pytest.mark.slow
def test_tokens_settle_while_they_are_written(browser, site):
    """Frames reach the cells before the text is finished: the number of blanks that the page showed on its way."""
    with opened(browser, site.url) as page:
        until(page, "document.querySelector('#left').options.length === 4")
        page.evaluate("""() => { window.blanks = new Set(); new MutationObserver(() => {
            if (document.querySelector('.side .cell')) blanks.add(document.querySelectorAll('.side .blank').length);
        }).observe(document.querySelector('#sides'), {childList: true, subtree: true, characterData: true}); }""")
        page.fill("#prompt", "a")
        page.select_option("#right", "")
        page.fill("#length", "16")
        page.click("#write")
        finished(page, 1)
        assert len(page.evaluate("[...blanks]")) > 3


@pytest.mark.slow
def test_an_address_that_asks_for_what_is_not_there_shows_what_is(browser, site):
    odd = {
        "layer": 99,
        "head": "x",
        "token": 500,
        "step": 900,
        "temperature": 9,
        "policy": "none",
        "rule": "none",
        "beside": "gone",
    }
    with opened(browser, address(site, **odd, seed="1e5")) as page:
        finished(page, 1)
        assert page.text_content("#step-said") == "finished"
        assert page.input_value("#layer") == ""
        assert page.input_value("#policy") == "llada"
        assert page.input_value("#seed") == "0"
        assert page.is_hidden(".detail")


# -- that it is true --------------------------------------------------------------------------------------------------------------


DESCRIBED = """{
  const [name, sinks] = expected;
  const shown = [...document.querySelectorAll('article.side')].find(one => one.querySelector('h2').textContent === name);
  const cells = [...shown.querySelectorAll('.cell:not(.own)')];
  return cells.length === sinks.length
    && cells.every((one, at) => (one.getAttribute('aria-description') === 'content sink') === sinks[at]);
}"""


@pytest.mark.parametrize("rule", ["absolute", pytest.param("relative", marks=pytest.mark.slow)])
def test_numbers_are_those_of_the_analysis(browser, site, lms, rule):
    """Sinks, turnover and moves come exact; shares of attention and value norms to half a byte of their scale."""
    ours = {"turnover": "turnover", "content_sinks": "content_sinks"}
    if rule == "relative":
        ours = {"turnover": "relative_turnover", "content_sinks": "relative_sinks"}
    n_sinks = 0
    with opened(browser, address(site, rule=rule, step=3)) as page:
        finished(page)
        for name in ("plain", "sunk"):
            trajectory = trajectory_of(lms[name])
            often = getattr(trajectory, rule).any(-1).mean(0)
            layer, head = np.unravel_index(often.argmax(), often.shape)
            told = side(page, name).locator(".heads p").text_content().replace("\xa0", " ")
            place, share = re.match(r"Content sinks are most frequent in (layer \d+, head \d+): ([\d.]+ %) of steps", told).groups()
            assert place == f"layer {layer}, head {head}"
            assert_shown(share, often.max(), 0)
            found = measure(trajectory, np.zeros(lms[name].config.embedding_rows, np.int8)).values
            sinks = getattr(trajectory, rule)
            assert sinks.sum() > 0
            for layer in (None, 0, 1):
                page.select_option("#layer", "" if layer is None else str(layer))
                value = {what: values[0] if layer is None else values[1][layer] for what, values in found.items()}
                for what, called in ours.items():
                    assert_shown(quantity(page, name, what), value[called], 0)
                if rule == "absolute":
                    assert_shown(quantity(page, name, "sink_heads"), value["sink_heads"], 0)
                    assert_shown(quantity(page, name, "moved"), value["moved"], 0)
                if name == "sunk":
                    assert_shown(quantity(page, name, "sink_mass"), value["sink_mass"], BYTE)
                top = trajectory.top_received if layer is None else trajectory.top_received[:, layer]
                assert_shown(quantity(page, name, "top_received"), top.mean(), BYTE)
                here = sinks[3] if layer is None else sinks[3, layer : layer + 1]
                expected = here.any((0, 1)).tolist()
                until(page, f"expected => {DESCRIBED}", [name, expected])
                n_sinks += sum(expected)
    assert n_sinks > 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"sink_kind": "logit"}, {"sink_kind": "register"}, {"n_sinks": 2, "sink_position": "end"}])
def test_every_kind_of_sink_is_shown_as_what_it_is(browser, flags):
    lm = sharp_lm(**flags)
    trajectory = trajectory_of(lm)
    with (
        serving({"one": sharp_lm(**flags)}) as found,
        opened(browser, address(found, model="one", beside="", step=2, token=-1)) as page,
    ):
        finished(page, 1)
        own = side(page, "one").locator(".cell.own")
        assert own.count() == lm.config.n_sinks
        assert_shown(quantity(page, "one", "sink_mass"), trajectory.sink_received.sum(-1).mean(), lm.config.n_sinks * BYTE)
        detail = side(page, "one").locator(".detail")
        norm = said_by(detail.locator("[data-quantity=value_norm]"))
        if flags.get("sink_kind") == "logit":
            assert norm == "n/a"
        else:
            scale = max(trajectory.value_norm[2].max(), trajectory.sink_value_norm[2].max()) / 255
            assert_shown(norm, trajectory.sink_value_norm[2, :, -1].mean(), scale / 2)
        assert ("every token" in said_by(detail.locator(".looks"))) == (flags.get("sink_kind") == "register")
        side(page, "one").locator(".cell").nth(lm.config.n_sinks + 4).click()
        looked(page, 1)
        row = attention_maps(lm.model, trajectory.tokens[2].tolist(), [(1, 1)], query=4)[1, 1][0]
        page.select_option("#layer", "1")
        page.select_option("#head", "1")
        looked(page, 1)
        assert said_by(detail.locator(".looks")).startswith("It attends most to")
        assert_shown(re.search(r"([\d.]+ %)", said_by(detail.locator(".looks")))[1], float(row.max()), BYTE)


def test_a_chosen_token_shows_what_the_model_does_with_it(browser, site, lms):
    lm, step = lms["sunk"], 2
    trajectory = trajectory_of(lm)
    canvas = trajectory.tokens[step].tolist()
    position = canvas.index(lm.config.mask_id)
    with opened(browser, address(site, model="sunk", beside="", step=step, layer=1, head=1, token=position)) as page:
        finished(page, 1)
        detail = side(page, "sunk").locator(".detail")
        looked(page, 1)
        norms = trajectory.value_norm[step, 1]
        scale = max(trajectory.value_norm[step].max(), trajectory.sink_value_norm[step].max()) / 255
        assert_shown(said_by(detail.locator("[data-quantity=value_norm]")), norms[position], scale / 2)
        seen = look_at(lm.model, canvas)
        assert_shown(said_by(detail.locator("[data-quantity=received]")), seen.received[1, 1, 1 + position], BYTE)
        assert said_by(detail.locator("[data-quantity=kind]")) == "still blank"
        row = attention_maps(lm.model, canvas, [(1, 1)], query=position)[1, 1][0]
        best = int(row.argmax())
        said = said_by(detail.locator(".looks"))
        assert said.startswith("It attends most to: ")
        assert ("sink token" if best == 0 else f"at {best - 1}") in said.split(",")[0]
        assert_shown(re.search(r"([\d.]+ %)", said)[1], float(row.max()), BYTE)
        with lm.model.inference():
            chances = lm.model.denoiser()(lm.model.embed.weight.new_tensor([canvas]).long())[0, position].softmax(-1)
        shares = [text.replace("\xa0", " ") for text in detail.locator(".candidates .share").all_text_contents()]
        for text, chance in zip(shares, chances.topk(5).values.tolist(), strict=True):
            assert_shown(text, chance, 1e-4)
        page.select_option("#layer", "")  # all heads: the mean row
        until(
            page,
            "before => !['', before].includes(document.querySelector('.looks').textContent)",
            arg=said.replace(" %", "\xa0%"),
        )
        places = [(layer, head) for layer in range(2) for head in range(2)]
        mean = np.mean([one[0].numpy() for one in attention_maps(lm.model, canvas, places, query=position).values()], axis=0)
        assert_shown(re.search(r"([\d.]+ %)", said_by(detail.locator(".looks")))[1], mean.max(), BYTE)


def test_words_claim_only_what_the_numbers_show(browser, site):
    """The line about two models follows their numbers, and is silent where there is nothing to compare."""
    with opened(browser, site.url) as page:
        tell = """async ([plain, own, nSinks]) => {
            const words = await import('/page/words.js');
            const facts = {model: 'm', nLayers: 1, nHeads: 1, sinkKind: 'isolated', nGiven: 1, nFrames: 3, length: 9};
            return words.pairWords([plain, {...facts, nSinks: 0}], [own, {...facts, nSinks}], 'heads and steps');
        }"""
        plain = {"sink_mass": 0, "top_received": 0.4, "content_sinks": 1, "sink_heads": 0.7, "turnover": 0.3, "moved": 2}

        def told(own, n=1, **more):
            words = page.evaluate(tell, [{**plain, **more}, {**plain, **own}, n])
            return words and words.replace("\xa0", " ")

        helps = told({"sink_mass": 0.5, "sink_heads": 0.1})
        assert "the sink token receives 50 % of all attention" in helps
        assert "70 % of heads and steps without it, 10 % with it" in helps
        assert "30 % of these content sinks change from step to step" in helps
        assert "change from step" not in told({"sink_mass": 0.5, "sink_heads": 0.1}, turnover=0)
        assert "receives only 39 %" in told({"sink_mass": 0.39, "sink_heads": 0.1})  # a token of the text has more
        assert "does not make content sinks fewer" in told({"sink_mass": 0.5, "sink_heads": 0.8})
        assert "hardly differ" in told({"sink_mass": 0.5, "sink_heads": 0.7})
        assert told({"sink_mass": 0.5, "sink_heads": 0.1}, n=0) is None
        page.goto(address(site))
        finished(page)
        assert "fewer content sinks" in page.text_content("#summary")
        assert page.locator("#summary p").count() == 2


# -- text is text -----------------------------------------------------------------------------------------------------------------


def test_what_a_model_writes_is_never_obeyed(browser, site):
    prompt = '<script>alert("p")</script>'
    with opened(browser, address(site, model="nasty", beside="", prompt=prompt, length=40, steps=10, temperature=2)) as page:
        finished(page, 1)
        written = set(texts(page, "nasty"))
        assert len(written & {NASTY[0], NASTY[1], "␀", "␛[31m", "\\u{202e}", "&lt;", "↵", "␣"}) >= 6
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", "".join(written))
        assert page.locator("#sides script, #sides img, #sides b").count() == 0
        assert page.input_value("#prompt") == prompt
        side(page, "nasty").locator(".cell").nth(5).click()
        looked(page, 1)
        assert side(page, "nasty").locator(".candidates li").count() == 5


def test_nothing_of_other_origins_and_nothing_inline_can_run(browser, site):
    answer = httpx.get(site.url, timeout=SECONDS)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in answer.text
    assert " style=" not in answer.text
    assert " on" not in re.sub(r'"[^"]*"|>[^<]*<', "", answer.text)
    with opened(browser, site.url, said="Content Security Policy") as page:
        page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=\"https://example.org/x.png\">')")
        assert page.evaluate("window.ran") is None
        until(page, "true")
    names = [path for path in PAGE.iterdir() if path.suffix == ".js"]
    assert len(names) > 10
    for path in names:
        assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write|\beval\(|new Function", path.read_text()), (
            path
        )


def test_the_first_load_is_small(browser, site):
    with opened(browser, site.url) as page:
        until(page, "document.querySelector('#left').options.length === 4")
        sizes = {url: len(httpx.get(url, timeout=SECONDS).content) for url in set(page.asked)}
    assert len(sizes) > 12
    assert sum(sizes.values()) < 200_000


# -- what goes wrong --------------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_out_of_the_address(browser):
    asked = urlencode({**ASKED, "beside": ""})
    with (
        serving({"plain": sharp_lm(n_sinks=0)}, api_key="secret") as found,
        opened(browser, f"{found.url}/#{asked}", said="401") as page,
    ):
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "wrong")
        with page.expect_response("**/v1/models") as refused:
            page.press("#key", "Enter")
        assert refused.value.status == 401
        assert page.is_visible("#key-form")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        finished(page, 1)
        assert page.is_hidden("#key-form")
        assert "secret" not in page.url
        assert "secret" not in page.content()


def test_a_refusal_that_comes_late_takes_nothing_away(browser):
    """Of a key that was mistyped, when the right one has been given and its text is written."""
    held = []
    with (
        serving({"plain": sharp_lm(n_sinks=0)}, api_key="secret") as found,
        opened(browser, f"{found.url}/#{urlencode({**ASKED, 'beside': ''})}", said="401") as page,
    ):
        page.wait_for_selector("#key-form:not([hidden])")
        page.route(
            "**/v1/models",
            lambda route: held.append(route) if route.request.headers["authorization"] == "Bearer wrong" else route.continue_(),
        )
        for key in ("wrong", "secret"):
            page.fill("#key", key)
            page.press("#key", "Enter")
        finished(page, 1)
        with page.expect_response("**/v1/models") as refused:
            held[0].continue_()
        assert refused.value.status == 401
        page.wait_for_timeout(200)  # what the page would make of it
        assert page.is_hidden("#key-form")
        assert page.is_visible("#ask")
        assert len(texts(page, "plain")) == len(PROMPT) + ASKED["length"]


@pytest.mark.slow
def test_a_refusal_a_full_queue_a_lost_server_and_no_prompt_look_like_something(browser):
    with (
        serving({"plain": sharp_lm(n_sinks=0)}, capacity=Capacity(waiting=1)) as found,
        opened(browser, found.url, said="Failed to load") as page,
    ):
        until(page, "document.querySelector('#left').options.length === 1")
        assert "from blanks alone" in page.text_content("#prompt-note")
        page.fill("#length", "9")
        page.click("#write")  # an empty prompt is a text from nothing
        finished(page, 1)
        assert len(texts(page, "plain")) == 9

        page.evaluate("document.querySelector('#length').removeAttribute('max')")
        page.fill("#length", "9999")
        page.click("#write")
        page.wait_for_selector("#notice.bad:not([hidden])")
        assert "at most" in page.text_content("#notice p")
        assert page.get_attribute("#notice", "role") == "alert"

        page.fill("#length", "9")
        full = json.dumps({"error": {"message": "the queue is full", "type": "", "param": None, "code": None}})
        page.evaluate(NOTED)
        tries = []
        page.route(
            "**/v1/completions",
            lambda route: (
                tries.append(1),
                route.fulfill(status=429, headers={"Retry-After": "1"}, body=full) if len(tries) < 2 else route.continue_(),
            ),
        )
        page.click("#write")
        until(page, "noted.some(words => words.includes('Next try in'))")  # it is there for a second
        finished(page, 1)  # it tried again by itself
        assert len(tries) == 2
        page.unroute("**/v1/completions")
        finished(page, 1)

        held = []
        page.route("**/v1/completions", lambda route: held.append(route))
        page.click("#write")
        until(page, "document.querySelector('#notice:not([hidden]) p')?.textContent.startsWith('Waiting for the model: ')")
        held[0].fulfill(status=200, content_type="text/event-stream", body='data: {"id": "x", "choices": []}\n\n')
        until(page, "document.querySelector('#notice.bad p')?.textContent.includes('in the middle of the text')")
        page.unroute("**/v1/completions")
        page.click("#notice button")  # try again
        finished(page, 1)
        assert page.is_hidden("#notice")

        page.route("**/v1/**", lambda route: route.abort())
        side(page, "plain").locator(".cell").nth(2).click()
        until(page, "document.querySelector('#notice.bad:not([hidden]) p')?.textContent.includes('does not answer')")
        assert "What is shown stays" in page.text_content("#notice p")
        assert len(texts(page, "plain")) == 9
        page.unroute("**/v1/**")
