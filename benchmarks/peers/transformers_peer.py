"""transformers, unsharded, eager on the CPU: `transformers_peer.py client`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from common import UserTimes, cut_prompt, measure, read_job, say
from transformers import AutoModelForCausalLM, AutoTokenizer


class Peer:
    """The model and its tokenizer; users of one load are one batch of equal length."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(job["hf_folder"], dtype=torch.bfloat16).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(job["hf_folder"])
        self.text = job["text"]

    @torch.inference_mode()
    def run(self, load: dict[str, Any], output_tokens: int) -> Iterator[UserTimes]:
        prompts = [cut_prompt(self.text, self.tokenizer.encode, load["prompt_tokens"], user) for user in range(load["num_users"])]
        users = [UserTimes() for _ in prompts]
        ids, cache = torch.tensor(prompts), None
        for _ in range(output_tokens):
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            for user, token in zip(users, ids[:, 0].tolist()):
                user.token(token)
        yield from users


def main() -> None:
    job = read_job()
    peer = Peer(job)
    say({"loaded": True})
    measure(job, peer.run)


if __name__ == "__main__":
    main()
