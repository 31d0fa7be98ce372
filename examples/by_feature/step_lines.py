"""Lines of a run: its rates, a part of the model that never trains, and a batch that makes the gradient norm jump.

    zeroaccel launch --cpu --num_processes 2 examples/by_feature/step_lines.py

A small language model reads sentences of different lengths, so batches have padding. Its second tower takes part in no
loss; after 10 steps a warning names it. In the last step one sample of rank 1 has a large weight in the loss: a warning
names the layers with the largest norms, the rank and the samples. A CPU's peak is not known, so the script sets one.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import zeroaccel
from zeroaccel.data import prepare_data_loader

WORDS = 512


class TwoTowers(nn.Module):
    """Predicts the next word with one tower; nothing uses the other."""

    def __init__(self, dim: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, dim)
        self.text = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, 0.0, batch_first=True) for _ in range(layers)
        )
        self.vision = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.head = nn.Linear(dim, WORDS, bias=False)

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        causal = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        for layer in self.text:
            x = layer(x, src_mask=causal, is_causal=True)
        logits, labels = self.head(x)[:, :-1], input_ids[:, 1:].masked_fill(attention_mask[:, 1:] == 0, -100)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sentences(count):
    """Returns sentences of 8 to 64 words, each a run of consecutive numbers."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 65, (count,), generator=random).tolist()
    starts = torch.randint(0, WORDS, (count,), generator=random).tolist()
    return [(torch.arange(length) + start) % WORDS for length, start in zip(lengths, starts, strict=True)]


def padded(batch):
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=0)
    lengths = torch.tensor([len(sample) for sample in batch])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=4, help="per process")
    parser.add_argument("--stage", type=int, default=3, help="0 to 3")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},  # layers are units
        "steps_per_print": 1,
        "peak_tflops": 0.1,
    }
    engine, *_ = zeroaccel.initialize(TwoTowers(), config=config)
    rank, world = engine.collectives.rank, engine.collectives.world_size
    loader = DataLoader(
        sentences(2 * args.batch_size * world * args.steps), args.batch_size, shuffle=True, collate_fn=padded
    )
    for number, batch in enumerate(
        prepare_data_loader(loader, rank=rank, world_size=world, collectives=engine.collectives)
    ):
        loss = engine(**batch)
        is_planted = rank == world - 1 and number == 2 * args.steps - 1
        engine.backward(loss * 100 if is_planted else loss)
        engine.step()
    engine.destroy()


if __name__ == "__main__":
    main()
