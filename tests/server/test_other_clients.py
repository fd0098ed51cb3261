"""Clients that people have, unchanged, each in a process of its own as people start it: litellm, LangChain, llm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .running import Running

LITELLM = """
    import json, litellm, os
    ask = [{"role": "user", "content": "Name three colours."}]
    common = dict(model="openai/sample", messages=ask, api_base=os.environ["BASE"], api_key="unused")
    common |= dict(max_tokens=12, temperature=0)
    whole = litellm.completion(**common)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **common))
    try:
        litellm.completion(**(common | {"model": "openai/gpt-4o"}))
    except litellm.NotFoundError as error:
        refused = str(error)
    print(json.dumps({"whole": whole.choices[0].message.content, "streamed": text, "tokens": whole.usage.completion_tokens,
                      "refused": refused}))
"""

LANGCHAIN = """
    import json, os
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field
    class Person(BaseModel):
        name: str = Field(max_length=12)
        age: int = Field(ge=0, le=120)
    model = ChatOpenAI(model="sample", base_url=os.environ["BASE"], api_key="unused", max_tokens=100, temperature=0)
    short = model.bind(max_tokens=12)
    whole = short.invoke("Name three colours.")
    text = "".join(chunk.content for chunk in short.stream("Name three colours."))
    person = model.with_structured_output(Person).invoke("Invent a person.")
    called = model.bind_tools([Person], tool_choice="Person").invoke("Invent a person.")
    print(json.dumps({"whole": whole.content, "streamed": text, "tokens": whole.usage_metadata["output_tokens"],
                      "age": person.age, "tool": called.tool_calls[0]["name"]}))
"""


def run_client(server: Running, tmp_path: Path, script: str) -> dict[str, object]:
    environment = {
        **{name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "SYSTEMROOT")},
        "BASE": f"{server.url}/v1",
        "HOME": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def expected(server: Running) -> str:
    answer = server.chat("Name three colours.", max_tokens=12).json()
    text = answer["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def test_litellm(server: Running, tmp_path: Path) -> None:
    answer = run_client(server, tmp_path, LITELLM)
    assert answer["whole"] == answer["streamed"] == expected(server)
    assert answer["tokens"] == 12
    assert "does not exist here" in str(answer["refused"])


def test_langchain_chat_openai(server: Running, tmp_path: Path) -> None:
    answer = run_client(server, tmp_path, LANGCHAIN)
    assert answer["whole"] == answer["streamed"] == expected(server)
    assert answer["tokens"] == 12
    assert answer["tool"] == "Person"
    assert isinstance(answer["age"], int)


@pytest.mark.parametrize("extra", [[], ["--no-stream"]])
def test_the_llm_command(server: Running, tmp_path: Path, extra: list[str]) -> None:
    """`llm` with an OpenAI-compatible endpoint in its configuration file."""
    entry = f"- model_id: home\n  model_name: sample\n  api_base: {server.url}/v1\n  api_key_name: unused\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    environment = {
        **{name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "SYSTEMROOT")},
        "LLM_USER_PATH": str(tmp_path),
        "HOME": str(tmp_path),
    }
    command = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        "home",
        "Name three colours.",
        "-o",
        "max_tokens",
        "12",
        "-o",
        "temperature",
        "0",
    ]
    done = subprocess.run([*command, "--key", "unused", *extra], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == expected(server).strip()
