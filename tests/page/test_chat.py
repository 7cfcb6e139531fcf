"""The chat: which requests it sends, what it shows, and what it keeps."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from tests.page.conftest import Open, Serve, until
from tests.page.engine import Json
from tests.page.server import Chunk, PageServer, error

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def server(serve: Serve) -> PageServer:
    return serve()


@pytest.fixture
def page(server: PageServer, open_page: Open) -> Any:
    # This server has no live feed, so the page's request for it gets 404.
    return open_page(server, refused=(404,))


def say(page: Any, text: str) -> None:
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    box.press("Enter")


def answer(page: Any) -> Any:
    """The last answer, after it is complete."""
    last = page.get_by_role("article", name="Answer").last
    last.get_by_role("button", name="Regenerate").wait_for()
    return last


def test_an_answer_is_painted_as_it_comes(server: PageServer, page: Any) -> None:
    def slow(_: Json) -> Iterable[Chunk]:
        for word in ["One", " two", " three", " four", " **five**"]:
            yield word
            yield 0.15

    server.script = slow
    page.evaluate(
        """() => {
            window.paints = [];
            const look = () => {
                const text = document.querySelector('.message.assistant .markdown')?.textContent ?? '';
                if (text && window.paints.at(-1) !== text) window.paints.push(text);
                requestAnimationFrame(look);
            };
            look();
        }"""
    )
    say(page, "Count.")
    done = answer(page)
    assert done.locator("strong").inner_text() == "five"
    paints = page.evaluate("window.paints.map((text) => text.trim())")
    assert len(paints) >= 3
    assert all(later.startswith(earlier) for earlier, later in pairwise(paints))
    facts = done.locator(".facts").inner_text()
    assert "5 tokens" in facts
    assert "tokens/s" in facts
    assert "TTFT" in facts
    assert "32 cached" in facts
    (body,) = server.chats
    assert body["messages"] == [{"role": "user", "content": "Count."}]
    assert body["stream_options"] == {"include_usage": True}
    assert body["model"] == "scripted"


def test_stop_stops(server: PageServer, page: Any) -> None:
    def endless(_: Json) -> Iterable[Chunk]:
        while True:
            yield "more "
            yield 0.02

    server.script = endless
    say(page, "Talk.")
    page.get_by_text("more more").wait_for()
    page.get_by_role("button", name="Stop").click()
    done = answer(page)
    assert "stopped" in done.locator(".facts").inner_text()
    assert server.hung_up.wait(10)
    page.get_by_role("button", name="Send", exact=True).wait_for()


def test_reasoning_is_folded(server: PageServer, page: Any) -> None:
    server.script = lambda _: [{"reasoning_content": "First I think."}, {"reasoning": " Then more."}, "Done."]
    say(page, "Think.")
    done = answer(page)
    thoughts = done.get_by_text("First I think. Then more.")
    assert not thoughts.is_visible()
    done.locator("summary").click()
    assert thoughts.is_visible()
    assert "Done." in done.inner_text()


def call(index: int, name: str, *parts: str) -> Iterable[Json]:
    head = {"index": index, "id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": ""}}
    yield {"tool_calls": [head]}
    for part in parts:
        yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}


def test_calls_are_cards_whose_results_are_sent_on(server: PageServer, page: Any) -> None:
    def tools(body: Json) -> Iterable[Chunk]:
        if body["messages"][-1]["role"] == "tool":
            yield f"It is {body['messages'][-1]['content']}."
        else:
            yield from call(0, "get_weather", '{"ci', 'ty": "Bern"}')
            yield from call(1, "get_time", "{}")

    server.script = tools
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Send tools").check()
    say(page, "The weather?")
    done = answer(page)
    card = done.get_by_role("region", name="Call of get_weather")
    assert '"city": "Bern"' in card.inner_text()
    card.get_by_label("Result").fill("rainy")
    done.get_by_role("region", name="Call of get_time").get_by_label("Result").fill("noon")
    done.get_by_role("button", name="Send results").click()
    page.get_by_text("It is noon.").wait_for()
    answer(page)
    first, second = server.chats
    assert first["tools"][0]["function"]["name"] == "get_weather"
    asked, *results = second["messages"][1:]
    assert [item["function"] for item in asked["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Bern"}'},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "call-0", "content": "rainy"},
        {"role": "tool", "tool_call_id": "call-1", "content": "noon"},
    ]
    # A different result makes a new branch.
    page.get_by_label("Result", exact=True).last.fill("midnight")
    page.get_by_role("button", name="Send as a new branch").click()
    page.get_by_text("It is midnight.").wait_for()
    answer(page)
    page.get_by_role("article", name="Results of tools").get_by_role("button", name="Branch before").click()
    page.get_by_text("It is noon.").wait_for()


def test_the_schema_box_sends_a_form(server: PageServer, page: Any) -> None:
    page.get_by_text("Form of the answer").click()
    page.get_by_label("Answers follow this JSON schema").check()
    box = page.get_by_label("JSON schema", exact=True)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    box.fill("{")
    page.get_by_text("This is no JSON").wait_for()
    box.fill(json.dumps(schema))
    say(page, "Answer.")
    answer(page)
    (body,) = server.chats
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }


def test_sampling_and_a_system_prompt_are_sent(server: PageServer, page: Any) -> None:
    values = {"Temperature": "0.5", "Top p": "0.9", "Top k": "40", "Min p": "0.05", "Max tokens": "77", "Seed": "3"}
    penalties = {"Presence penalty": "0.1", "Frequency penalty": "0.2", "Repetition penalty": "1.1"}
    for label, value in {**values, **penalties}.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Stop strings").fill("END\nSTOP")
    page.get_by_label("System prompt").fill("Be brief.")
    say(page, "Hello.")
    answer(page)
    (body,) = server.chats
    expected: Json = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 77, "seed": 3}
    expected |= {"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "stop": ["END", "STOP"]}
    assert {name: body.get(name) for name in expected} == expected
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_branches(server: PageServer, page: Any) -> None:
    say(page, "first words")
    answer(page)
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2/2").wait_for()
    answer(page)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("other words")
    page.get_by_role("button", name="Send as a new branch").click()
    page.get_by_role("article", name="Answer").get_by_text("other words").wait_for()
    answer(page)
    page.get_by_role("article", name="Your message").get_by_role("button", name="Branch before").click()
    assert "first words" in answer(page).inner_text()
    assert page.get_by_text("2/2").is_visible()
    assert [body["messages"][-1]["content"] for body in server.chats] == ["first words", "first words", "other words"]


def test_conversations_stay_in_the_browser(server: PageServer, page: Any) -> None:
    say(page, "remember this")
    answer(page)
    page.reload()
    names = page.get_by_role("navigation", name="Conversations")
    names.get_by_role("button", name="remember this", exact=True).click()
    assert "remember this" in answer(page).inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = download.value.path()
    page.on("dialog", lambda dialog: dialog.accept())
    names.get_by_role("button", name="Delete remember this").click()
    names.get_by_role("button", name="remember this", exact=True).wait_for(state="detached")
    page.reload()
    page.get_by_label("A file of conversations").set_input_files(file)
    page.get_by_text("1 conversation was added.").wait_for()
    names.get_by_role("button", name="remember this", exact=True).click()
    assert "remember this" in answer(page).inner_text()


def test_log_probabilities_colour_tokens(server: PageServer, page: Any) -> None:
    page.get_by_label("Colour tokens by probability").check()
    say(page, "one two three four")
    done = answer(page)
    (body,) = server.chats
    assert body["logprobs"] is True
    tokens = done.locator(".tokens .token")
    assert tokens.count() == 4
    classes = [item.get_attribute("class") for item in tokens.all()]
    assert classes[0] == "token p9"
    assert len(set(classes)) > 1
    assert "98.0 %" in (tokens.first.get_attribute("title") or "")


def test_requests_are_copied_without_the_key(server: PageServer, open_page: Open) -> None:
    server.key = "very-secret"
    page = open_page(server, refused=(401, 404), permissions=["clipboard-read", "clipboard-write"])
    page.get_by_text("The server wants an API key").first.wait_for()
    page.get_by_label("API key").fill("very-secret")
    page.get_by_role("button", name="Use").click()
    page.get_by_role("combobox", name="Model").get_by_text("second").wait_for(state="attached")
    page.get_by_label("Top k").fill("7")
    say(page, "It's me")
    answer(page)
    page.get_by_role("button", name="Copy as curl").click()
    page.get_by_role("button", name="Copied").wait_for()
    curl = page.evaluate("navigator.clipboard.readText()")
    assert curl.startswith(f"curl -N {server.url}/v1/chat/completions")
    assert "It'\\''s me" in curl
    page.get_by_role("button", name="Copy as Python").click()
    until(page, "navigator.clipboard.readText().then((text) => text.includes('OpenAI'))")
    source = page.evaluate("navigator.clipboard.readText()")
    compile(source, "copied", "exec")
    assert 'extra_body={\n        "top_k": 7,' in source
    assert "very-secret" not in curl + source
    assert page.evaluate("sessionStorage.getItem('forebay.key')") == "very-secret"
    assert "very-secret" not in page.evaluate("JSON.stringify({...localStorage})")


def test_models_are_chosen_loaded_or_not(server: PageServer, open_page: Open) -> None:
    server.images = True
    page = open_page(server, refused=(404,))
    choice = page.get_by_role("combobox", name="Model")
    choice.get_by_text("second (asleep, 93 MB)").wait_for(state="attached")
    image = page.get_by_role("button", name="Attach images")
    image.wait_for()
    choice.select_option("second")
    image.wait_for(state="detached")
    say(page, "Hello")
    answer(page)
    (body,) = server.chats
    assert body["model"] == "second"


def test_images_are_sent_as_data(server: PageServer, open_page: Open, tmp_path: Any) -> None:
    server.images = True
    page = open_page(server, refused=(404,))
    file = tmp_path / "pixel.png"
    file.write_bytes(b64decode(PIXEL))
    page.get_by_label("Images", exact=True).set_input_files(file)
    page.get_by_alt_text("Attached image 1").wait_for()
    say(page, "What is it?")
    answer(page)
    (body,) = server.chats
    image, text = body["messages"][0]["content"]
    assert image == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    assert text == {"type": "text", "text": "What is it?"}


def test_a_model_without_images_offers_none(page: Any) -> None:
    page.get_by_role("button", name="Attach images").wait_for(state="detached")


@pytest.mark.parametrize("status", [400, 429, 503])
def test_refusals_are_said_in_plain_words(server: PageServer, open_page: Open, status: int) -> None:
    page = open_page(server, refused=(404, status))
    server.refuse = error(status, "because of reasons", "top_k")
    say(page, "Hello.")
    said = answer(page).get_by_role("alert").inner_text()
    assert said.startswith("The server ")
    assert "because of reasons (top_k)" in said


def test_an_error_in_a_stream_is_shown_behind_what_came(server: PageServer, page: Any) -> None:
    server.script = lambda _: ["So far ", error(500, "the hand died")]
    say(page, "Hello.")
    done = answer(page)
    assert "So far" in done.inner_text()
    assert "the hand died" in done.get_by_role("alert").inner_text()


def test_a_stream_that_breaks_off_is_an_error(server: PageServer, page: Any) -> None:
    def broken(_: Json) -> Iterable[Chunk]:
        yield "So far"
        raise OSError

    server.script = broken
    say(page, "Hello.")
    assert "connection ended" in answer(page).get_by_role("alert").inner_text()
