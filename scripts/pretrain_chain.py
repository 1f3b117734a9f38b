# SPDX-License-Identifier: Apache-2.0
"""Train the embedded model: a small Llama that writes look-up chains.

    python scripts/pretrain_chain.py OUTPUT_FOLDER

Supervised on fresh problems until its accuracy, sampled at temperature 1 with a dense cache, passes --accuracy. Two
things are done to it on purpose. A little label noise (--noise) gives reinforcement learning something to remove. And
some sequences (--forgetting) are trained with a random part of their older entries hidden from each head, so that the
model, like large ones, has more than one way to find what it needs; without it a model this small depends on every
entry, and any eviction breaks it.

Writes the model in bf16 and its tokenizer in Hugging Face layout, with the seed, the settings and the weights' hash
beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_rl.model.attention import registered
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.tasks.chain import EOS, INCREMENT, PAD, STEP, TOKEN, TOTAL, Chain, chain_tokenizer, right_answer

YOUNGEST, OLDEST = 8, 64  # ages at which a hidden entry may disappear


def build(hidden: int, attention: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKEN),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=TOKEN[PAD],
        bos_token_id=None,
        eos_token_id=TOKEN[EOS],
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def noisy(chains: torch.Tensor, step_len: int, noise: float, generator: torch.Generator) -> torch.Tensor:
    """Some of the increments, sums and answers replaced by random digits."""
    place = torch.arange(chains.shape[1], device=chains.device) % step_len
    digit = (place == INCREMENT) | (place == TOTAL)
    digit[-3:] = torch.tensor([False, True, False])
    hit = (torch.rand(chains.shape, generator=generator, device=chains.device) < noise) & digit
    return torch.where(hit, torch.randint(0, 10, chains.shape, generator=generator, device=chains.device), chains)


def forgetting(batch: int, length: int, heads: int, group: int, share: float, generator: torch.Generator):
    """bool (batch, heads, length, length): which keys a query sees. An entry hidden from a KV head stays hidden."""
    device = generator.device
    chance = torch.rand((batch, 1, 1), generator=generator, device=device)
    chance = chance * (torch.rand((batch, 1, 1), generator=generator, device=device) < share)
    hidden = torch.rand((batch, heads // group, length), generator=generator, device=device) < chance
    age = torch.randint(YOUNGEST, OLDEST, hidden.shape, generator=generator, device=device)
    place = torch.arange(length, device=device)
    last_seen = torch.where(hidden, place + age, length)  # (batch, KV heads, keys)
    seen = (place[:, None] >= place) & (place[:, None] <= last_seen[:, :, None, :])
    return seen.repeat_interleave(group, dim=1)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, task: Chain, hidden: int, count: int = 512) -> float:
    copy = build(hidden, registered()).to(model.device).eval()
    copy.load_state_dict(model.state_dict())
    tokenizer = chain_tokenizer()
    loaded = LoadedModel(model=copy, tokenizer=tokenizer, shape=dry_run(copy))
    engine = Engine(loaded, config=EngineConfig(rows=count, compile=False))
    rollouts = engine.generate(task.held_out(count), Sampling(max_tokens=task.chain_len + 16))
    texts = [str(tokenizer.decode(rollout.token_ids, skip_special_tokens=True)) for rollout in rollouts]
    return sum(right_answer(texts, [rollout.prompt.columns["answer"] for rollout in rollouts])) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    for name in ("letters", "steps", "filler"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Chain(), name))
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, a multiple of 64")
    parser.add_argument("--noise", type=float, default=0.02, help="chance that a digit of the chain is replaced")
    parser.add_argument("--forgetting", type=float, default=0.5, help="share of sequences with hidden entries")
    parser.add_argument("--accuracy", type=float, default=0.72, help="stop above this")
    parser.add_argument("--seconds", type=float, default=400.0, help="or after this long")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, help="of a batch, at most; longer chains then come in smaller batches")
    parser.add_argument("--ramp", type=int, default=1500, help="updates over which chains grow to their full length")
    parser.add_argument("--every", type=int, default=250, help="updates between two looks at the accuracy")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator(device=args.device).manual_seed(args.seed)
    task = Chain(letters=args.letters, steps=args.steps, filler=args.filler)
    model = build(args.hidden, "sdpa").to(args.device)
    heads, group = (
        model.config.num_attention_heads,
        model.config.num_attention_heads // model.config.num_key_value_heads,
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    began, step, reached = time.time(), 0, 0.0
    while time.time() - began < args.seconds and reached <= args.accuracy:
        # Short chains first: the look-up is learnt on them, and they are quick.
        steps = task.steps if step >= args.ramp else max(2, task.steps * step // args.ramp)
        chain = Chain(letters=task.letters, steps=steps, filler=task.filler)
        batch = min(args.batch, (args.tokens or 1 << 30) // (chain.prompt_len + chain.chain_len))
        problems = chain.problems(batch, generator)
        chains = noisy(problems.chains, STEP + task.filler, args.noise, generator)
        ids = torch.cat([problems.prompts, chains], dim=1)[:, :-1]
        mask = forgetting(batch, ids.shape[1], heads, group, args.forgetting, generator)
        for settings in optimizer.param_groups:
            settings["lr"] = args.lr * min(1.0, (step + 1) / 200)
        with torch.autocast("cuda", torch.bfloat16, enabled=args.device == "cuda"):
            logits = model(ids, attention_mask=mask, use_cache=False).logits
        loss = cross_entropy(logits[:, task.prompt_len - 1 :].flatten(0, 1).float(), chains.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % args.every == 0:
            if step > args.ramp:
                reached = accuracy(model, task, args.hidden)
            print(f"step {step} loss {loss.item():.4f} accuracy {reached:.3f} {time.time() - began:.0f} s", flush=True)

    final = build(args.hidden, registered())
    final.load_state_dict(model.state_dict())
    final.to(torch.bfloat16).save_pretrained(args.output)
    chain_tokenizer().save_pretrained(args.output)
    weights = (args.output / "model.safetensors").read_bytes()
    record = {
        "script": "scripts/pretrain_chain.py",
        "settings": {k: v for k, v in vars(args).items() if k not in ("output", "seconds")},
        "updates": step,
        "accuracy": reached,
        "hardware": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "sha256": hashlib.sha256(weights).hexdigest(),
        "bytes": len(weights),
    }
    (args.output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
