# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl inspect`: what caches hold and read of one text, and what that changes, as a page and a picture.

The caches read it in evaluate/inspection.py; the page is made in report/inspect_page.py, the picture in
report/inspect_plot.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparse_rl.cli.parsing import add_model, make_parser, model_dtype, parse, quiet_bars, show_warnings

if TYPE_CHECKING:
    from sparse_rl.evaluate.inspection import Reading
    from sparse_rl.kv import KVPolicy
    from sparse_rl.model.load import LoadedModel
    from sparse_rl.types import Prompt

DESCRIPTION = """See what KV policies keep and read of one text, side by side: the picture to choose a policy by.

The dense model answers the prompt. Then each cache reads that same answer token by token, so that they can be compared
at every token. OUTPUT gets inspect.html (needs nothing but itself; any layer and head can be picked) and inspect.png:

  map       which positions are read as the text grows; the darker, the more layers and heads read it; policies that
            choose pages hold more than they read, which is pale orange
  overlap   sum over the vocabulary of min(p_dense, p_sparse) at every token: 1 is as dense, dips show what was lost
  text      every token, the darker, the more of the time since it was written it was read

A cache is POLICY:BUDGET or POLICY:key=value,... with any setting of the policy; give two or more to compare them. Short
texts want a short interval (its default is 128 tokens): otherwise the cache is hardly ever cut.

  sparse-rl inspect
  sparse-rl inspect --kv rkv:budget=40,interval=8 rkv:budget=56,interval=8 --output inspect/budgets
  sparse-rl inspect --kv rkv:budget=48,interval=16 quest:64 rkv:budget=96,interval=16,select=pages_mean,select_budget=48
  sparse-rl inspect --model smollm2 --kv rkv:budget=64,interval=16 streaming:budget=64,interval=16
  sparse-rl inspect --model smollm2 --prompt "Why is the sky blue?" --max-tokens 200 --kv snapkv:budget=64,interval=16
"""
KV = ["rkv:budget=40,interval=8", "snapkv:budget=40,interval=8", "streaming:budget=40,interval=8", "pages_mean:64"]
TELLING = 6  # the embedded task's held-out problem that visits all letters


def run(arguments: list[str]) -> None:
    parser = make_parser("inspect", DESCRIPTION)
    add_model(parser, default="embedded")
    parser.add_argument(
        "--prompt",
        type=str | None,
        default=None,
        help="a text, or @FILE; a chat turn where the model has a chat template; without it, a look-up task's",
    )
    parser.add_argument("--kv", nargs="+", type=str, default=KV, help="caches: rkv:64, snapkv:budget=64,interval=16")
    parser.add_argument("--max-tokens", type=int, default=200, help="most tokens of the answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the answer; 0 takes the best token")
    parser.add_argument("--seed", type=int, default=0, help="of the answer")
    parser.add_argument("--output", type=str, default="inspect", help="folder for inspect.html and inspect.png")
    settings = parse(parser, arguments)
    given = settings.prompt
    if given is not None and given.startswith("@"):
        from sparse_rl.tasks.files import read_text

        given = read_text(Path(given[1:]).read_bytes(), given[1:])
    from sparse_rl.evaluate.inspection import answer, read
    from sparse_rl.evaluate.plan import usable_caches
    from sparse_rl.model.load import load
    from sparse_rl.report.inspect_page import summary_lines, write_inspection
    from sparse_rl.rollout import Sampling
    from sparse_rl.specs import renamed

    policies = usable_caches(settings.kv)
    with renamed("sampling", "--"):
        sampling = Sampling(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed)
    folder = Path(settings.output)
    if file := next((place for place in (folder, *folder.parents) if place.is_file()), None):
        raise ValueError(f"--output {settings.output!r} cannot be made: {file} is a file; name a folder.")
    show_warnings()
    quiet_bars()
    loaded = load(settings.model, dtype=model_dtype(settings.dtype), device=settings.device)
    prompt = _prompt(settings.model, given, loaded)
    loaded.fit(len(prompt.ids) + sampling.max_tokens)
    with renamed("sampling", "--"):
        text = answer(loaded, prompt, sampling)
    folder.mkdir(parents=True, exist_ok=True)
    readings = read(loaded, text, policies)
    print("\n".join([*summary_lines(readings), *_never_cut(readings, policies)]))
    written = write_inspection(readings, folder, settings.model)
    print(f"wrote {' and '.join(map(str, written))}")


def _never_cut(readings: list[Reading], policies: dict[str, KVPolicy]) -> list[str]:
    """A hint for each evicting cache that the text was too short for."""
    from sparse_rl.kv import EvictPolicy

    hints = []
    for reading in readings:
        policy, text = policies.get(reading.name), reading.text
        if isinstance(policy, EvictPolicy) and not reading.firings:
            due = policy.trigger(text.prompt_len, len(text.ids))
            hints.append(
                f"{reading.name} was never cut: it is due at {due} entries (interval {policy.interval}), and the text "
                f"has {len(text.ids)} tokens; give a smaller budget or interval, or more --max-tokens."
            )
    return hints


def _prompt(model: str, text: str | None, loaded: LoadedModel) -> Prompt:
    from sparse_rl.tasks.chain import Chain
    from sparse_rl.tasks.lookup import Lookup
    from sparse_rl.tasks.prompts import as_turn, make_prompt

    if text is None:
        if model == "embedded":
            return Chain().held_out(TELLING + 1)[TELLING]
        return Lookup().build(loaded.tokenizer).held_out(1)[0]
    turn = as_turn(text, loaded.tokenizer) if loaded.tokenizer.chat_template else text
    return make_prompt({"prompt": turn}, "--prompt", loaded.tokenizer)
