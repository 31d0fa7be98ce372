"""Replaces `trl vllm-serve`: the same requests and the same group for weights, with transformers on a CPU.

    python tests/interop/scripts/generator/server.py --model NAME --port 8000 [--seed 0] [--log FILE]

TRL's client (1.10 and before) broadcasts the weights one by one; the next request uses them. One random generator
samples all completions, so that the same requests to the same weights give the same completions. The server writes a
line to `--log` per synchronization: the number of weights and a hash of them all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.stateless_group import StatelessProcessGroup


class Generator:
    """A model, the group that transfers its weights, and the names of the received weights."""

    def __init__(self, name: str, seed: int, log: Path | None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(name)
        self._weights = dict(self.model.named_parameters())
        self._random = torch.Generator().manual_seed(seed)
        self._log = log
        self._lock = threading.Lock()
        self._received: list[str] = []
        self._communicator: PyNcclCommunicator | None = None
        self._pending: list[threading.Thread] = []

    def join(self, host: str, port: int, world_size: int) -> None:
        """Joins the group for weights in the background: the client joins it after this request."""

        def connect() -> None:
            group = StatelessProcessGroup.create(host, port, rank=0, world_size=world_size)
            self._communicator = PyNcclCommunicator(group, "cpu")

        self._begin(connect)

    def receive(self, name: str, dtype: str, shape: list[int]) -> None:
        """Receives a weight that the client broadcasts after this request."""
        if name not in self._weights:
            raise KeyError(f"{name}: not a weight of the model")
        value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))

        def take() -> None:
            communicator = self._communicator
            assert communicator is not None
            communicator.broadcast(value, src=communicator.group.world_size - 1)
            communicator.group.barrier()
            with torch.no_grad():
                self._weights[name].copy_(value)
            self._received.append(name)

        self._begin(take)

    def settle(self) -> None:
        """Waits for running transfers; logs the weights received since the last call."""
        while self._pending:
            self._pending.pop(0).join()
        if self._received and self._log is not None:
            digest = hashlib.sha256()
            for weight in self._weights.values():
                digest.update(weight.detach().numpy().tobytes())
            with self._log.open("a") as file:
                file.write(f"{len(self._received)} {len(set(self._received))} {digest.hexdigest()[:16]}\n")
        self._received.clear()

    @torch.no_grad()
    def generate(self, prompt: list[int], most: int, temperature: float) -> tuple[list[int], list[float]]:
        """Returns the generated tokens and their log probabilities."""
        tokens, logprobs = list(prompt), []
        ends = self.model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        for _ in range(most):
            scores: Tensor = self.model(torch.tensor([tokens])).logits[0, -1].float() / temperature
            chosen = int(torch.multinomial(scores.softmax(-1), 1, generator=self._random))
            logprobs.append(float(scores.log_softmax(-1)[chosen]))
            tokens.append(chosen)
            if chosen in ends:
                break
        return tokens[len(prompt) :], logprobs

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the response to a request."""
        with self._lock:
            if path == "update_named_param":
                self.receive(request["name"], request["dtype"], request["shape"])
                return {"message": "the broadcast may begin"}
            self.settle()
            if path == "init_communicator":
                self.join(request["host"], request["port"], request["world_size"])
            elif path == "generate":
                asked = request["prompts"]
                prompts = [self._tokenizer.encode(each) if isinstance(each, str) else each for each in asked]
                made = [
                    self.generate(prompt, request["max_tokens"], request["temperature"])
                    for prompt in prompts
                    for _ in range(request["n"])
                ]
                return {
                    "prompt_ids": prompts,
                    "completion_ids": [tokens for tokens, _ in made],
                    "logprobs": [[[value] for value in values] for _, values in made],
                    "logprob_token_ids": [[[token] for token in tokens] for tokens, _ in made],
                }
            return {"message": "done", "world_size": 1, "success": True}

    def _begin(self, call: Any) -> None:
        # Transfers run one after the other, in the order of the requests, like the broadcasts.
        before = list(self._pending)

        def ordered() -> None:
            for thread in before:
                thread.join()
            call()

        thread = threading.Thread(target=ordered, daemon=True)
        self._pending.append(thread)
        thread.start()


def serve(generator: Generator, port: int) -> None:
    """Answers requests until the process is killed."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            request = json.loads(self.rfile.read(length)) if length else {}
            try:
                status, answer = 200, generator.answer(self.path.strip("/"), request)
            except Exception as error:
                status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *arguments: Any) -> None:
            """Suppresses the message per request."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    arguments = parser.parse_args()
    serve(Generator(arguments.model, arguments.seed, arguments.log), arguments.port)


if __name__ == "__main__":
    main()
