"""Text classification: is a line of text Python or English? A small BERT learns it from the standard library.

    zeroaccel launch --num_processes 2 --zero_stage 2 examples/nlp_example.py
    python examples/nlp_example.py                    # one process; the script is the same

The lines are code and docstrings of the Python standard library; the example downloads nothing, and a token is a byte.
"""

import argparse
import ast
import random
import sysconfig
from pathlib import Path

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from zeroaccel import Accelerator, set_seed

PYTHON, ENGLISH = 0, 1
PADDING = 256  # the token after the 256 bytes
LENGTH = 64


def read_lines(count):
    """Returns `count` pairs of a line and its class, half of them from each class."""
    found = {PYTHON: [], ENGLISH: []}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        prose = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                prose.update(line.strip() for line in (ast.get_docstring(node) or "").splitlines())
        for line in map(str.strip, source.splitlines()):
            if len(line) > 20 and not line.startswith("#"):
                found[ENGLISH if line in prose else PYTHON].append(line)
        if min(map(len, found.values())) >= 2 * count:
            break
    chosen = [(line, kind) for kind, lines in found.items() for line in random.Random(0).sample(lines, count // 2)]
    random.Random(1).shuffle(chosen)
    return chosen


def collate(lines):
    """Returns a batch, padded to its longest line."""
    tokens = [torch.tensor(list(text.encode()[:LENGTH])) for text, _ in lines]
    input_ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PADDING)
    labels = torch.tensor([kind for _, kind in lines])
    return {"input_ids": input_ids, "attention_mask": (input_ids != PADDING).long(), "labels": labels}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as set by the launcher")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lines", type=int, default=2000, help="lines of text, a fifth of them for evaluation")
    parser.add_argument("--batch_size", type=int, default=16, help="per process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)

    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(args.seed)

    lines = read_lines(args.lines)
    held_out = args.lines // 5
    train_dataloader = DataLoader(lines[held_out:], args.batch_size, shuffle=True, collate_fn=collate)
    eval_dataloader = DataLoader(lines[:held_out], args.batch_size, collate_fn=collate)

    config = BertConfig(
        vocab_size=257,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        pad_token_id=PADDING,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    optimizer = AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    # The length of the prepared loader is the number of batches of this process.
    steps = len(train_dataloader) * args.num_epochs
    scheduler = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, steps // 10, steps))

    accuracies = []
    for epoch in range(args.num_epochs):
        model.train()
        for batch in train_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = total = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predicted = model(**batch).logits.argmax(dim=-1)
            # Results of all processes, without the samples repeated to fill the last batch.
            predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
            correct += (predicted == labels).sum().item()
            total += len(labels)
        accuracies.append(correct / total)
        accelerator.print(f"epoch {epoch}: accuracy {accuracies[-1]:.3f} over {total} lines")
    accelerator.end_training()
    return accuracies


if __name__ == "__main__":
    main()
