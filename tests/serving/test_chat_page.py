"""The page for chats in a headless browser: streamed tokens, their probabilities and experts, errors, stops."""

import math

import pytest
from browser import CHROMIUM, DRIVER, open_browser
from test_experts_server import first_experts, mixture_llm
from test_server_limits import running, slowed


pytestmark = [
    pytest.mark.grid,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium and its chromedriver are not installed"),
]
ENTER = "\ue007"  # The key in WebDriver's encoding.
TOKENS = "[...document.querySelectorAll('.token')].flatMap((span) => span.tokens)"
IS_IDLE = "return document.querySelector('#send').textContent === 'send'"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return mixture_llm(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def server(llm):
    """A server; yields its service and its port."""
    with running(llm) as started:
        yield started


@pytest.fixture
def page(server, tmp_path):
    """The page, with a picture of its end among the temporary files."""
    with open_browser() as browser:
        browser.open(f"http://127.0.0.1:{server[1]}/")
        browser.wait_for("return document.title === 'tiny'")
        yield browser
        browser.screenshot(tmp_path / "page.png")


def ask(page, question, tokens=40):
    for name, value in (("temperature", 9), ("tokens", tokens), ("seed", 3)):
        page.run(f"document.querySelector('#{name}').value = {value}")
    page.type("#input", question + ENTER)


def test_tokens_are_streamed_with_their_probabilities_and_experts(page, server, llm, monkeypatch):
    slowed(server[0], monkeypatch, 0.2)
    ask(page, "Hi")
    counts = {
        page.wait_for(f"const count = {TOKENS}.length; return count > {number} && count") for number in (0, 8, 20)
    }
    assert len(counts) == 3 and not page.run(IS_IDLE)
    page.wait_for(IS_IDLE)
    answer = llm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=40, temperature=9.0, seed=3, log_probs=True)
    assert page.run("return document.querySelector('.assistant').textContent") == answer.text
    log_probs = page.run(f"return {TOKENS}.map((token) => token.logprob)")
    assert log_probs == pytest.approx(list(answer.log_probs), abs=1e-3)
    alone = "[...document.querySelectorAll('.token')].findLast((span) => span.tokens.length === 1)"
    page.point_at(page.run(f"return {alone}"))
    rows = page.text("#details").split("\n")
    shares = [float(row.split()[-2]) for row in rows if row.endswith("%")]
    assert len(shares) in (5, 6) and shares == sorted(shares, reverse=True)
    share = float(page.text("#details .sampled .share").split()[-2])
    number = page.run(f"return {TOKENS}.indexOf({alone}.tokens[0])")
    assert share == pytest.approx(100 * math.exp(answer.log_probs[number]), abs=0.11)
    backgrounds = "return [...document.querySelectorAll('.token')].map((span) => span.style.background)"
    by_probability = page.run(backgrounds)
    expected = first_experts(llm, llm.chat_tokens([{"role": "user", "content": "Hi"}]), answer.ids)
    for layer in (1, 2):
        page.choose("#color", str(layer))
        assert page.run(f"return {TOKENS}.map((token) => token.experts[{layer}][0][0])") == expected[layer]
        colors = page.run(backgrounds)
        experts = page.run(
            f"return [...document.querySelectorAll('.token')].map((span) => span.tokens.at(-1).experts[{layer}][0][0])"
        )
        assert colors != by_probability and len({*zip(colors, experts)}) == len({*experts}) == len({*colors}) > 1
        page.point_at(page.find("h1"))
        page.point_at(page.find(".token"))
        assert f"layer {layer}: experts and weights" in page.text("#details")
        assert f"expert {experts[-1]}" in page.text("#details")
    assert "its share of the tokens" in page.text("#legend")
    page.click("#clear")
    assert page.text("#talk") == "" and page.errors() == []


def test_errors_are_shown_plainly(page):
    ask(page, "Hi", tokens=10**6)
    page.wait_for("return document.querySelector('.error')")
    assert page.text(".error").startswith("max_tokens is 1,000,000, but at most ")
    assert page.run(IS_IDLE) and page.run("return messages.length") == 0
    ask(page, "Hi", tokens=3)
    page.wait_for(f"return {TOKENS}.length >= 3 && document.querySelector('#send').textContent === 'send'")


def test_an_answer_is_stopped_in_the_middle(page, server, monkeypatch):
    slowed(server[0], monkeypatch, 0.3)
    ask(page, "Hi", tokens=150)
    page.wait_for(f"return {TOKENS}.length > 8")
    page.click("#send")
    page.wait_for(IS_IDLE)
    assert page.text(".note") == "stopped" and 8 < page.run(f"return {TOKENS}.length") < 150
    assert page.run("return messages.map((message) => message.role)") == ["user", "assistant"]
    deadline = "return fetch('health').then((response) => response.json()).then((health) => health.active === 0)"
    page.wait_for(deadline)


@pytest.mark.parametrize(
    "text", ["x = 1 < 2 && '<b>é 🙂'", "```python\ndef f():\n\treturn 1\n```\nNow text"], ids=["unicode", "code"]
)
def test_texts_are_shown_as_they_are(page, text):
    """Pieces come from the page's own functions, cut in the middle of characters and lines."""
    script = """
        const answer = new Answer(add("assistant", "")), bytes = new TextEncoder().encode(arguments[0]);
        const decoder = new TextDecoder("utf-8");
        const token = (text) => ({token: text || "token_id:7", logprob: -1, top_logprobs: []});
        for (const byte of bytes) {
          const piece = decoder.decode(new Uint8Array([byte]), {stream: true});
          answer.push(piece, [token(byte < 128 ? piece : "")], "");
        }
        answer.push("", [], "stop");
        const code = [...answer.node.querySelectorAll(".code")].map((span) => span.textContent).join("");
        return [answer.node.textContent, code, answer.node.querySelectorAll(".token").length];
    """
    shown, code, spans = page.run(script, text)
    assert shown == text and spans == len(text)
    assert code == ("```python\ndef f():\n\treturn 1\n```\n" if "```" in text else "")
    assert page.run("return document.querySelectorAll('.assistant b').length") == 0
