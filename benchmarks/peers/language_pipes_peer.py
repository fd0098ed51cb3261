"""language-pipes 2.5.0: `serve` runs one node (started in order, the first one has the API), `client` asks it over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import UserTimes, at_once, cut_prompt, measure, read_job, say

MODEL_ID = "local/sample"
PEER_PORT, API_PORT = 5111, 8111
KEY = "000102030405060708090a0b0c0d0e0f"
START_TIMEOUT_S = 180.0


def layer_gib(folder: Path, num_layers: int) -> float:
    """Size of one layer in GiB, the unit of a node's memory limit."""
    from safetensors import safe_open

    total = 0
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  it is not a dict
            if ".layers." in name:
                total += file.get_tensor(name).nbytes
    return total / num_layers / 2**30


def write_config(job: dict[str, Any], home: Path) -> Path:
    """A node's TOML: its share of the layers, and where the first node is."""
    import toml

    folder = Path(job["hf_folder"])
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    count, index = len(job["addresses"]), job["index"]
    mine = num_layers // count + (1 if index < num_layers % count else 0)
    memory = (mine + 0.3) * layer_gib(folder, num_layers)
    data: dict[str, Any] = {
        "node_id": f"node{index}",
        "network_ip": job["addresses"][index],
        "network_key": KEY,
        "peer_port": PEER_PORT,
        "layer_models": [{"model_id": MODEL_ID, "device": "cpu", "memory": memory, "data_type": 16}],
        "bootstrap_nodes": [] if index == 0 else [{"address": job["addresses"][0], "port": PEER_PORT}],
    }
    if index == 0:
        data["job_port"] = API_PORT
        data["end_models"] = [{"model_id": MODEL_ID, "num_local_layers": 0, "device": "cpu"}]
    model = home / "models" / MODEL_ID
    model.mkdir(parents=True)
    (model / "data").symlink_to(folder)
    path = home / "node.toml"
    path.write_text(toml.dumps(data))
    return path


def serve(job: dict[str, Any]) -> None:
    """Run a node until killed; `ready` when its layers (and the first one's end model) are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        config = write_config(job, home)
        threads = str(job["threads"])
        env = dict(os.environ, LP_MODEL_DIR=str(home / "models"), LP_APP_DIR=str(home / "app"), HOME=folder,
                   OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, HF_HUB_OFFLINE="1")  # fmt: skip
        program = Path(sys.executable).with_name("language-pipes")
        node = subprocess.Popen(
            [str(program), "-c", str(config), "run"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        watch = threading.Thread(target=lambda: (sys.stdin.read(), node.kill()), daemon=True)
        watch.start()
        wanted = {"successfully loaded on"} | ({"loaded successfully"} if job["index"] == 0 else set())
        for line in node.stdout or ():
            print(line, end="", file=sys.stderr)
            wanted -= {text for text in wanted if text in line}
            if not wanted:
                print("ready", flush=True)
                wanted = {"\0"}
        node.wait()


class Client:
    """Asks the first node's API, streamed."""

    def __init__(self, job: dict[str, Any]) -> None:
        from transformers import AutoTokenizer

        self.address, self.text = job["addresses"][0], job["text"]
        self.tokenizer = AutoTokenizer.from_pretrained(job["hf_folder"])

    def ask(self, prompt: str, output_tokens: int, times: UserTimes) -> None:
        body = {"model": MODEL_ID, "stream": True, "temperature": 0.0, "max_completion_tokens": output_tokens,
                "messages": [{"role": "user", "content": prompt}]}  # fmt: skip
        connection = http.client.HTTPConnection(self.address, API_PORT, timeout=300)
        times.start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"language-pipes answered {response.status}: {response.read()[:300]!r}")
        while line := response.readline():
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                if choice.get("delta", {}).get("content"):
                    times.token(choice["delta"]["content"])
            elif line.startswith(b"data: [DONE]"):
                break
        connection.close()
        if not times.arrived:
            raise SystemExit("language-pipes sent no token")

    def run(self, load: dict[str, Any], output_tokens: int) -> Iterator[UserTimes]:
        prompts = []
        for user in range(load["num_users"]):
            ids = cut_prompt(self.text, self.tokenizer.encode, load["prompt_tokens"], user)
            prompts.append(self.tokenizer.decode(ids))
        yield from at_once(load["num_users"], lambda user, times: self.ask(prompts[user], output_tokens, times))


def main() -> None:
    job = read_job()
    if sys.argv[1] == "serve":
        serve(job)
        return
    client = Client(job)
    say({"loaded": True})
    measure(job, client.run)


if __name__ == "__main__":
    main()
