# SPDX-License-Identifier: Apache-2.0
"""Train the embedded model: a small Llama that writes look-up chains, with a little label noise for RL to remove.

    python scripts/pretrain_chain.py OUTPUT_FOLDER

Supervised on fresh problems until its accuracy, sampled at temperature 1 with a dense cache, passes --accuracy. Writes
the model in bf16 and its tokenizer in Hugging Face layout, with the seed, the settings and the weights' hash beside it.
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

from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.tasks.chain import EOS, PAD, STEP, STEP_DIGITS, TOKEN, Chain, chain_tokenizer, rewards_of


def build(device: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKEN),
        hidden_size=192,
        intermediate_size=432,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=TOKEN[PAD],
        bos_token_id=None,
        eos_token_id=TOKEN[EOS],
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sparse_rl").to(device)


def accuracy(model: LlamaForCausalLM, task: Chain, count: int = 512) -> float:
    model.eval()
    loaded = LoadedModel(model=model, tokenizer=chain_tokenizer(), shape=dry_run(model))
    engine = Engine(loaded, config=EngineConfig(rows=count))
    rollouts = engine.generate(task.sample(count, -1), Sampling(max_tokens=task.max_tokens))
    model.train()
    return sum(rewards_of(rollouts)) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=30, help="of a chain")
    parser.add_argument("--noise", type=float, default=0.02, help="chance that a digit of the chain is replaced")
    parser.add_argument("--accuracy", type=float, default=0.7, help="stop above this")
    parser.add_argument("--seconds", type=float, default=400.0, help="or after this long")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator(device=args.device).manual_seed(args.seed)
    task = Chain(steps=args.steps, seed=args.seed)
    model = build(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    began, step, reached = time.time(), 0, 0.0
    prompt_len = 5 * task.letters + 2
    while time.time() - began < args.seconds and reached <= args.accuracy:
        # Short chains first: the look-up is learnt on them, and they are quick.
        steps = task.steps if step > 1500 else max(2, task.steps * step // 1500)
        problems = Chain(letters=task.letters, steps=steps).problems(args.batch, generator)
        chains = problems.chains
        place = torch.arange(chains.shape[1], device=args.device) % STEP
        digit = (place == STEP_DIGITS[0]) | (place == STEP_DIGITS[1])
        digit[-3:] = torch.tensor([False, True, False])  # and the answer's
        noisy = (torch.rand(chains.shape, generator=generator, device=args.device) < args.noise) & digit
        digits = torch.randint(0, 10, chains.shape, generator=generator, device=args.device)
        chains = torch.where(noisy, digits, chains)
        ids = torch.cat([problems.prompts, chains], dim=1)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 200)
        with torch.autocast("cuda", torch.bfloat16, enabled=args.device == "cuda"):
            logits = model(ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits[:, prompt_len - 1 :].flatten(0, 1).float(), chains.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 250 == 0:
            print(f"step {step} chain {steps} loss {loss.item():.4f} {time.time() - began:.0f} s", flush=True)
        if step >= 1750 and step % 250 == 0:
            reached = accuracy(model, task)
            print(f"  accuracy {reached:.3f}", flush=True)

    model.to(torch.bfloat16).save_pretrained(args.output)
    chain_tokenizer().save_pretrained(args.output)
    weights = (args.output / "model.safetensors").read_bytes()
    record = {
        "script": "scripts/pretrain_chain.py",
        "settings": {k: v for k, v in vars(args).items() if k not in ("output", "seconds")},
        "steps_taken": step,
        "accuracy": reached,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "bytes": len(weights),
    }
    (args.output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
