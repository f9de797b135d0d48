"""Stock clients against real engines: the `openai` and `anthropic` packages, as their documentation uses them, with nothing set but the address."""

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest
from engine_requests import MODEL
from engines import Pair
from serving import Router, running_router

from pdserve.config import load_config

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("clean")]

QUESTION = "What is the capital of France?"
WEATHER_QUESTION = (
    'What is the weather in Paris? Find out with <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call> please.'
)
"""a model this small calls a tool in the right form if it is shown the form"""
GREEDY = {"extra_body": {"temperature": 0}}
"""for a client whose present version knows no temperature"""
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def router(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    config = load_config(overrides={"router.port": 0, "served_model_name": MODEL})
    with running_router(pair, config, tmp_path_factory.mktemp("router")) as running:
        yield running


@pytest.fixture
def stock(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(router: Router) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=router.url, api_key="any", max_retries=0) as client:
        yield client


def test_openai_responses_whole_and_streamed_are_the_same(stock: openai.OpenAI) -> None:
    """`store` is left out, as most do; the stream's last event holds what the whole answer does."""
    whole = stock.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16)
    assert whole.status in ("completed", "incomplete")
    assert "Paris" in whole.output_text
    with stock.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert (final.usage.input_tokens, final.usage.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)
    assert whole.usage.output_tokens == 16 or whole.status == "completed"
    assert final.id.startswith("resp_")


def test_openai_responses_go_on_with_the_whole_conversation(stock: openai.OpenAI) -> None:
    """The output of one turn is the input of the next, tools included: all that a client without a store does."""
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}
    forced = {"type": "function", "name": "get_weather"}
    items: list[object] = [{"role": "user", "content": WEATHER_QUESTION}]
    first = stock.responses.create(model=MODEL, input=items, tools=[tool], tool_choice=forced, temperature=0, max_output_tokens=120)  # type: ignore[call-overload]
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "get_weather"
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    second = stock.responses.create(model=MODEL, input=items, tools=[tool], temperature=0, max_output_tokens=8)  # type: ignore[call-overload]
    assert second.output


def test_openai_responses_that_need_a_store_are_refused_by_name(stock: openai.OpenAI) -> None:
    """Each with an exception of the client's own that names the field and says what to do instead."""
    for field, value in (("background", True), ("previous_response_id", "resp_1"), ("conversation", "conv_1")):
        with pytest.raises(openai.BadRequestError, match="keeps no responses") as refused:
            stock.responses.create(model=MODEL, input=QUESTION, **{field: value})  # type: ignore[call-overload]
        assert refused.value.param == field
    for operation in (stock.responses.retrieve, stock.responses.cancel, stock.responses.delete):
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            operation("resp_1")
    assert stock.responses.create(model=MODEL, input=QUESTION, max_output_tokens=1, store=True).id


def test_openai_chat_with_tools_and_a_schema(stock: openai.OpenAI) -> None:
    """Whole and streamed, the call's arguments and the answer are JSON of the schema."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": WEATHER_QUESTION}],
        "temperature": 0,
        "max_tokens": 120,
    }
    whole = stock.chat.completions.create(**asked, tools=[tool], tool_choice=chosen)  # type: ignore[call-overload]
    (call,) = whole.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}
    stream = stock.chat.completions.create(**asked, tools=[tool], tool_choice=chosen, stream=True)  # type: ignore[call-overload]
    calls = [call for event in stream for choice in event.choices for call in choice.delta.tool_calls or ()]
    assert "".join(call.function.arguments or "" for call in calls) == whole.choices[0].message.tool_calls[0].function.arguments
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    shaped = stock.chat.completions.create(**asked, response_format=form)  # type: ignore[call-overload]
    assert set(json.loads(shaped.choices[0].message.content)) == {"city"}


def test_openai_completions_of_several_prompts_and_choices(stock: openai.OpenAI) -> None:
    """What one engine must do alone is done all the same."""
    answer = stock.completions.create(model=MODEL, prompt=["One, two,", "A, b,"], n=2, max_tokens=3, temperature=0.8, seed=1)
    assert len(answer.choices) == 4
    assert stock.models.retrieve(MODEL).id == MODEL


def test_anthropic_messages_whole_and_streamed_are_the_same(claude: anthropic.Anthropic) -> None:
    """Text, stop reason and usage; a cache that nothing was read from is told as such."""
    asked = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": QUESTION}], "system": "Be brief.", **GREEDY}
    whole = claude.messages.create(**asked)  # type: ignore[call-overload]
    with claude.messages.stream(**asked) as stream:  # type: ignore[arg-type]
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in whole.content[0].text
    assert text == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    used = [u.input_tokens + (u.cache_read_input_tokens or 0) + (u.cache_creation_input_tokens or 0) for u in (final.usage, whole.usage)]
    counted = claude.messages.count_tokens(model=MODEL, messages=asked["messages"], system="Be brief.")  # type: ignore[arg-type]
    assert used == [counted.input_tokens] * 2


def test_anthropic_tools_and_their_results(claude: anthropic.Anthropic) -> None:
    """A forced call in both forms, and the turn after it."""
    tool = {"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}
    messages: list[object] = [{"role": "user", "content": WEATHER_QUESTION}]
    asked = {"model": MODEL, "max_tokens": 120, "tools": [tool], **GREEDY}
    chosen = {"type": "tool", "name": "get_weather"}
    whole = claude.messages.create(**asked, messages=messages, tool_choice=chosen)  # type: ignore[call-overload]
    with claude.messages.stream(**asked, messages=messages, tool_choice=chosen) as stream:  # type: ignore[arg-type]
        final = stream.get_final_message()
    calls = [next(block for block in answer.content if block.type == "tool_use") for answer in (whole, final)]
    assert calls[0].input == calls[1].input
    assert set(calls[0].input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sunny"}
    messages += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**asked, messages=messages).content  # type: ignore[call-overload]


def test_anthropic_errors_are_the_clients_own(claude: anthropic.Anthropic) -> None:
    """An unknown model, a bad field, and what only the engine can refuse."""
    messages = [{"role": "user", "content": QUESTION}]
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.messages.create(model="other", max_tokens=5, messages=messages)  # type: ignore[arg-type]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model=MODEL, max_tokens=0, messages=messages)  # type: ignore[arg-type]
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "nobody", "content": "x"}])  # type: ignore[list-item]
    assert refused.value.body["type"] == "error"  # type: ignore[index]
    assert claude.models.list().data[0].id == MODEL


def test_tokens_go_there_and_back(router: Router) -> None:
    """Any worker turns text into tokens and tokens into text."""
    told = router.public.post("/tokenize", json={"model": MODEL, "prompt": QUESTION}).raise_for_status().json()
    assert told["count"] == len(told["tokens"])
    assert router.public.post("/detokenize", json={"tokens": told["tokens"]}).raise_for_status().json() == {"prompt": QUESTION}
    refused = router.public.post("/detokenize", json={"tokens": [2**31 - 1]})
    assert refused.status_code < 500
