"""A GGUF's weights as bfloat16 safetensors, without an end-of-text token: `gguf_to_hf.py MODEL.gguf FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main(gguf: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = folder / name
        data = json.loads(path.read_text())
        for key in ("eos_token_id", "eos_token", "chat_template"):
            data.pop(key, None)
        path.write_text(json.dumps(data, indent=1))
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
