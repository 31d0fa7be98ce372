"""Causal language modelling with a DeepSpeed config file, which may set the optimizer and the schedule.

    zeroaccel launch --num_processes 2 --deepspeed_config_file zero_stage3.json examples/by_feature/config_support.py \\
        --train_file text.txt --output_dir out --with_tracking --report_to tensorboard

If the file has an "optimizer" or a "scheduler" section, `DummyOptim` and `DummyScheduler` represent them and fill their
"auto" values; otherwise the script uses its own. The script makes the model from a config and reads text from a file;
by default the model is a tiny Llama, a token is a byte, and the text is the source of the standard library.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, get_scheduler

from zeroaccel import Accelerator, DummyOptim, DummyScheduler, set_seed


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config_name", help="a config of transformers: a folder, or a config.json")
    add("--tokenizer_name", help="a folder with a tokenizer; by default a token is a byte")
    add("--train_file", help="text to train on")
    add("--validation_file", help="text to evaluate on; by default the last tenth of the other")
    add("--block_size", type=int, default=64, help="tokens per sample")
    add("--output_dir", default="out", help="folder for states, and at the end for the model")
    add("--learning_rate", type=float, default=1e-3)
    add("--weight_decay", type=float, default=0.0)
    add("--lr_scheduler_type", default="linear")
    add("--num_warmup_steps", type=int, default=0)
    add("--per_device_train_batch_size", type=int, default=8)
    add("--per_device_eval_batch_size", type=int, default=8)
    add("--gradient_accumulation_steps", type=int, help="default: the setting of the launcher or the config file")
    add("--num_train_epochs", type=int, default=1)
    add("--max_train_steps", type=int, help="number of updates; overrides the epochs")
    add("--checkpointing_steps", help='updates between two states, or "epoch"')
    add("--resume_from_checkpoint", help="folder of a state")
    add("--with_tracking", action="store_true")
    add("--report_to", default="all", help="all, tensorboard or wandb")
    add("--seed", type=int, default=42)
    return parser.parse_args(argv)


def read_blocks(args, tokenizer):
    """Returns (train, validation): lists of samples, each `block_size` tokens."""

    def tokens(text):
        return torch.tensor(tokenizer(text)["input_ids"] if tokenizer else list(text.encode()))

    if args.train_file:
        text = Path(args.train_file).read_text(encoding="utf-8")
    else:
        text = "".join(Path(sysconfig.get_path("stdlib"), name).read_text() for name in ("ast.py", "bisect.py"))
    cut = len(text) if args.validation_file else len(text) * 9 // 10
    held_out = Path(args.validation_file).read_text(encoding="utf-8") if args.validation_file else text[cut:]
    parts = [tokens(text[:cut]), tokens(held_out)]
    return [list(ids[: len(ids) // args.block_size * args.block_size].view(-1, args.block_size)) for ids in parts]


def evaluate(model, dataloader, accelerator):
    """Returns (perplexity, mean loss) over all samples, each counted once."""
    model.eval()
    losses = []
    for ids in dataloader:
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        of_tokens = cross_entropy(logits[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none")
        losses.append(accelerator.gather_for_metrics(of_tokens.mean(dim=1)))
    loss = torch.cat(losses).mean().item()
    return math.exp(loss), loss


def make_schedule(args, optimizer, configured, max_train_steps):
    def of(made):
        return get_scheduler(args.lr_scheduler_type, made, args.num_warmup_steps, max_train_steps)

    if "scheduler" in configured:
        return DummyScheduler(optimizer, total_num_steps=max_train_steps, warmup_num_steps=args.num_warmup_steps)
    if "optimizer" in configured:  # prepare() makes it, and the schedule needs it
        return DummyScheduler(optimizer, lr_scheduler_callable=of)
    return of(optimizer)


def main(argv=None):
    args = parse_args(argv)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=args.report_to if args.with_tracking else None,
        project_dir=args.output_dir,
    )
    set_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name) if args.tokenizer_name else None
    train, validation = read_blocks(args, tokenizer)
    train_dataloader = DataLoader(train, args.per_device_train_batch_size, shuffle=True)
    eval_dataloader = DataLoader(validation, args.per_device_eval_batch_size)
    if args.config_name:
        config = AutoConfig.from_pretrained(args.config_name)
    else:
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=len(tokenizer) if tokenizer else 256, **size)
    model = AutoModelForCausalLM.from_config(config)

    # The config file decides if it or the script defines the optimizer and the schedule.
    configured = accelerator.state.deepspeed_plugin.deepspeed_config if accelerator.state.deepspeed_plugin else {}
    make_optimizer = DummyOptim if "optimizer" in configured else torch.optim.AdamW
    optimizer = make_optimizer(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)

    updates = math.ceil(len(train_dataloader) / accelerator.num_processes / accelerator.gradient_accumulation_steps)
    max_train_steps = args.max_train_steps or args.num_train_epochs * updates
    lr_scheduler = make_schedule(args, optimizer, configured, max_train_steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accelerator.print(accelerator.state)
    accelerator.init_trackers("clm", config=vars(args))

    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
    done = train_dataloader.epoch * updates + train_dataloader.batches_given // accelerator.gradient_accumulation_steps
    save_every = int(args.checkpointing_steps) if str(args.checkpointing_steps).isdigit() else None
    best, best_folder = math.inf, Path(args.output_dir, "best_checkpoint")
    while done < max_train_steps:
        epoch = train_dataloader.epoch
        model.train()
        for ids in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            accelerator.log({"train_loss": loss.item(), "lr": lr_scheduler.get_last_lr()[0]}, step=done)
            if save_every and done % save_every == 0:
                accelerator.save_state(Path(args.output_dir, f"step_{done}"))
            if done >= max_train_steps:
                break
        perplexity, eval_loss = evaluate(model, eval_dataloader, accelerator)
        accelerator.print(f"epoch {epoch}: perplexity {perplexity:.4f}, eval_loss {eval_loss:.4f}")
        accelerator.log({"perplexity": perplexity, "eval_loss": eval_loss}, step=done)
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(Path(args.output_dir, f"epoch_{epoch}"))
        if perplexity < best:
            best = perplexity
            accelerator.save_state(best_folder)

    # The loaded state must give exactly the best perplexity.
    accelerator.load_state(best_folder)
    perplexity, _ = evaluate(model, eval_dataloader, accelerator)
    if perplexity != best:
        raise AssertionError(f"best perplexity {best}, after loading its state {perplexity}")
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if tokenizer and accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    accelerator.print(f"best perplexity {best:.4f}")
    accelerator.end_training()
    return best


if __name__ == "__main__":
    main()
