"""The generator: samples with each version of the weights that train.py publishes.

    python generate.py --folder /dev/shm/policy --versions 31

It uses only rollout/receiver.py of zeroaccel, which needs only torch: copy that file to run without the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from policy import LENGTH, SAMPLES, TOKENS, Policy
from torch import Tensor

from zeroaccel.rollout.receiver import WeightReceiver, receive_files


@torch.no_grad()
def sample(policy: Policy, generator: torch.Generator) -> Tensor:
    """Returns (SAMPLES, LENGTH) tokens."""
    tokens = torch.randint(TOKENS, (SAMPLES, 1), generator=generator)
    while tokens.shape[1] < LENGTH:
        chances = policy(tokens[:, -1:])[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    return tokens


def main(argv: Sequence[str] | None = None) -> None:
    """Samples with every version up to the last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--versions", type=int, default=31)
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    policy = Policy().bfloat16()
    receiver = WeightReceiver(policy.state_dict())  # shares its tensors with the policy, which change in place
    generator = torch.Generator().manual_seed(1)
    while (receiver.version or 0) < arguments.versions:
        if not receive_files(receiver, arguments.folder, "generator", timeout_seconds=60):
            raise SystemExit("no weights for a minute")
        path = arguments.folder / f"samples-{receiver.version}.pt"
        torch.save(sample(policy, generator), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    print(f"sampled with version {receiver.version}")


if __name__ == "__main__":
    main()
