"""The official `openai` client, unchanged, against a real deployment."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest

ASK = [{"role": "user", "content": "Name three colours."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    likes_tea: bool


def chat(client: openai.OpenAI, **fields: object) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(**({"model": "sample", "messages": ASK, "max_tokens": 12, "temperature": 0} | fields))


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == "sample"
    assert client.models.retrieve("sample").owned_by == "shardwise"
    assert not any("/" in name for name in names)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-4o")


def test_an_answer_has_text_usage_and_a_finish_reason(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_streamed_text_equals_the_whole_and_ends_with_usage(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=20)
    stream = client.chat.completions.create(
        model="sample", messages=ASK, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage


def test_n_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    first = chat(client, n=3, temperature=1, seed=7)
    again = chat(client, n=3, temperature=1, seed=7)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]


def test_stop_ends_before_the_stop_text(client: openai.OpenAI) -> None:
    free = chat(client, max_tokens=30).choices[0].message.content or ""
    word = free.split()[4]
    stopped = chat(client, max_tokens=30, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == free[: free.index(word)]


def test_logprobs_name_the_chosen_token_and_the_best(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=4, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # greedy
        assert bytes(entry.bytes or []).decode() == entry.token
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content


def test_logit_bias_forbids_a_token(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=1, logprobs=True, top_logprobs=0)
    first = client.post("/../tokenize", body={"content": answer.choices[0].message.content}, cast_to=object)
    assert isinstance(first, dict)
    other = chat(client, max_tokens=1, logit_bias={str(first["tokens"][0]): -100})
    assert other.choices[0].message.content != answer.choices[0].message.content


def test_penalties_change_a_repetitive_text(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": "Repeat the word tea twenty times."}]
    plain = chat(client, messages=ask, max_tokens=24).choices[0].message.content
    penalized = chat(client, messages=ask, max_tokens=24, frequency_penalty=2, presence_penalty=2).choices[0].message.content
    assert plain != penalized


def test_json_object(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=200)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    else:
        assert (answer.choices[0].message.content or "").startswith("{")


def test_json_schema_parses_into_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="sample",
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format=Person,
        max_tokens=120,
        temperature=0,
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert 0 <= person.age <= 120


def test_a_required_tool_is_called_with_valid_arguments(client: openai.OpenAI) -> None:
    answer = chat(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")


def test_a_streamed_tool_call(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    stream = client.chat.completions.create(
        model="sample", messages=ASK, tools=[WEATHER], tool_choice=choice, max_tokens=100, temperature=0, stream=True
    )
    calls, reasons, text = [], [], ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    assert calls
    assert calls[0].index == 0
    assert json.loads(calls[0].function.arguments)["unit"]
    assert reasons[-1] == "tool_calls"
    assert not text.strip()


def test_multi_turn_with_a_tool_result(client: openai.OpenAI) -> None:
    called = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Bern", "unit": "celsius"}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Bern?"}]},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "18 degrees, sunny"},
    ]
    answer = chat(client, messages=messages, tools=[WEATHER], max_tokens=24)
    assert answer.choices[0].message.content
    alone = chat(client, messages=messages[:2], max_tokens=24)
    assert answer.usage is not None
    assert alone.usage is not None
    assert answer.usage.prompt_tokens > alone.usage.prompt_tokens


def test_completions_with_several_prompts_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="sample", prompt=["One, two,", "Red, green,"], max_tokens=4, temperature=0, n=2, echo=True
    )
    assert len(answer.choices) == 4
    assert answer.choices[0].text.startswith("One, two,")
    assert answer.choices[3].text.startswith("Red, green,")
    scored = client.completions.create(model="sample", prompt="One, two,", max_tokens=4, temperature=0, logprobs=2)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == scored.choices[0].text
    assert all(len(top) == 2 for top in logprobs.top_logprobs or [])
    pieces = client.completions.create(model="sample", prompt="One, two,", max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == scored.choices[0].text


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="sample", input="Name three colours.", max_output_tokens=12, temperature=0)
    assert whole.output_text
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    with client.responses.stream(model="sample", input="Name three colours.", max_output_tokens=12, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_responses_with_a_schema_and_a_tool(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="sample", input="Invent a person.", text_format=Person, temperature=0, max_output_tokens=120
    )
    assert isinstance(parsed.output_parsed, Person)
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER["function"]["parameters"], "strict": True}
    called = client.responses.create(
        model="sample", input="Weather in Bern?", tools=[tool], tool_choice="required", temperature=0, max_output_tokens=100
    )
    call = called.output[0]
    assert call.type == "function_call"
    assert json.loads(call.arguments)["unit"]


def test_errors_arrive_as_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4o' does not exist here"):
        chat(client, model="gpt-4o")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, temperature=9)
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, messages=[{"role": "user", "content": "tea " * 2000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.UnprocessableEntityError, match="not trained to give embeddings"):
        client.embeddings.create(model="sample", input="x")
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.UnprocessableEntityError, match="text only"):
        chat(client, messages=[{"role": "user", "content": picture}])
