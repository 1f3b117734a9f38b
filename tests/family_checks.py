# SPDX-License-Identifier: Apache-2.0
"""Whether a model works here: what it samples, scores, keeps and learns, each against transformers' own attention.

The reference is the same model with its family's eager attention, one text at a time, nothing packed and nothing paged.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path

import torch
import transformers
from padded_batch import generate
from replay import scheduled_firings, visible_positions
from slow_evict import SlowSequence

from sparse_rl.kv import RKV, Full
from sparse_rl.kv.sparse_cache import SparseCache
from sparse_rl.model.attention import UnsupportedModelError
from sparse_rl.model.load import LoadedModel, load
from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.loss import LossConfig
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score import score
from sparse_rl.score.head import Head
from sparse_rl.train.learner import Learner
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.update import UpdateConfig, update
from sparse_rl.types import Rollout

LENGTHS = (37, 37, 9)  # of the prompts; two alike, which `generate` takes without padding
LOOPED = (1, 2)  # of them: those whose cuts are done again in loops; one is cut at once, one grows first
NUM_TOKENS = 64
SPARSE = RKV(budget=24, interval=8, window=4)
CLOSE = 1e-4  # of log-probs in fp32
CLOSE_CALL = 1e-3  # greedy tokens may differ where the two best logits are closer than this
MATTERS = 0.05  # by which a cut must change some log-prob: else attention does not count, and nothing is seen


VERDICTS = Path(__file__).parent / "model" / "verdicts.json"
NEWEST = "5.22"  # other versions hold what differs there; null where a type is unknown


def release() -> str:
    """Of the installed transformers: "5.22"."""
    return ".".join(transformers.__version__.split(".")[:2])


def recorded(version: str | None = None) -> dict[str, str]:
    """Verdicts by cell, of the installed version unless another is named."""
    everything = json.loads(VERDICTS.read_text())
    merged = everything[NEWEST] | everything.get(version or release(), {})
    return {cell: text for cell, text in merged.items() if text is not None}


def record(verdicts: dict[str, str], known: set[str]) -> None:
    """Replace those of the installed version; only what is known there stays."""
    everything = json.loads(VERDICTS.read_text())
    now = {cell: text for cell, text in (recorded() | verdicts).items() if cell in known}
    if release() == NEWEST:
        everything[NEWEST] = now
    else:
        newest = everything[NEWEST]
        everything[release()] = {
            cell: now.get(cell) for cell in sorted({*newest, *now}) if now.get(cell) != newest.get(cell)
        }
    everything = {version: dict(sorted(given.items())) for version, given in sorted(everything.items())}
    VERDICTS.write_text(json.dumps(everything, indent=1) + "\n")


def verdict(model: transformers.PreTrainedModel, folder: Path) -> str:
    """`works` or `refused: REASON`; raises where the model is loaded and something is wrong."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    try:
        loaded = load(str(folder))
    except UnsupportedModelError as error:
        return f"refused: {_steady(str(error).replace(str(folder), 'FOLDER'))}"
    check(loaded, model)
    return "works"


def _steady(message: str) -> str:
    """Without measured numbers, which differ by machine."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", "N", message)


def check(loaded: LoadedModel, eager: transformers.PreTrainedModel) -> None:
    """Every property of the matrix, or an AssertionError that says which."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]
    config = EngineConfig(rows=len(prompts), page_size=16)
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, stop_ids=())
    full = Engine(loaded, Full(), config).generate(prompts, sampling)
    check_generate(eager, prompts[:2], full)
    check_scores(loaded, eager, full)
    sparse = Engine(loaded, SPARSE, config).generate(prompts, sampling, record_kept=True)
    check_sparse(loaded, eager, sparse)
    check_sparse_cache(loaded, prompts, sparse)
    check_gradient(loaded, eager, full)  # moves the weights


def check_generate(eager: transformers.PreTrainedModel, prompts: list[list[int]], rollouts: list[Rollout]) -> None:
    ids = torch.tensor(prompts)
    out = eager.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    for row, rollout in enumerate(rollouts[: len(prompts)]):
        tokens = out.sequences[row, ids.shape[1] :]
        differ = (tokens != rollout.token_ids).nonzero().flatten().tolist()
        if differ:
            best = out.logits[differ[0]][row].topk(2).values
            assert best[0] - best[1] < CLOSE_CALL, f"generate takes other tokens from token {differ[0]} on"


@torch.no_grad()
def check_scores(loaded: LoadedModel, eager: transformers.PreTrainedModel, rollouts: list[Rollout]) -> None:
    packed = score(loaded.model, rollouts, temperature=1.0)
    for rollout, scores in zip(rollouts, packed, strict=True):
        expected = chosen_logprobs(eager, rollout)
        off = (rollout.sampler_logprobs - expected).abs().max()
        assert off <= CLOSE, f"|log_xi| of a full cache is {off:.1e}"
        off = (scores.dense_logprobs - expected).abs().max()
        assert off <= CLOSE, f"packed scores are off by {off:.1e}"


def chosen_logprobs(model: transformers.PreTrainedModel, rollout: Rollout, **how: object) -> torch.Tensor:
    """Of the tokens of one rollout, by the model alone."""
    prompt_len = len(rollout.prompt.ids)
    ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]])
    logits = model(input_ids=ids[:, :-1], use_cache=False, **how).logits[0, prompt_len - 1 :]
    return torch.log_softmax(logits.float(), -1).gather(-1, rollout.token_ids[:, None])[:, 0]


def check_sparse(loaded: LoadedModel, eager: transformers.PreTrainedModel, rollouts: list[Rollout]) -> None:
    """Log-probs are those of the family's own attention that sees what was held; what is kept the slow policy keeps."""
    masked, differs = masked_twin(eager), 0.0
    for row, rollout in enumerate(rollouts):
        assert rollout.kept_positions is not None
        firings = scheduled_firings(len(rollout.prompt.ids), len(rollout.token_ids), SPARSE)
        times = [seen for seen, _ in firings]
        assert len(times) >= 5, "the cache is hardly cut"
        visible = visible_positions(
            prompt_len=len(rollout.prompt.ids),
            num_tokens=len(rollout.token_ids),
            firings=list(zip(times, rollout.kept_positions, strict=True)),
            windows=loaded.shape.windows,
            num_kv_heads=loaded.shape.num_kv_heads,
        )
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        with torch.no_grad():
            logprobs = chosen_logprobs(masked, rollout, visible=visible, seen=seen)
            differs = max(differs, float((chosen_logprobs(eager, rollout) - logprobs).abs().max()))
        off = (rollout.sampler_logprobs - logprobs).abs().max()
        assert off <= CLOSE, f"log-probs of a sparse cache are off by {off:.1e}"
        if row in LOOPED:
            check_kept(loaded, rollout, times, seen)
    assert differs > MATTERS, f"dropping entries changes log-probs by {differs:.1e} at most"


def check_kept(loaded: LoadedModel, rollout: Rollout, times: list[int], seen: dict) -> None:
    keys, queries = (torch.stack([seen[layer][i] for layer in sorted(seen)]).double().numpy() for i in (1, 0))
    assert rollout.kept_positions is not None
    prompt_len = len(rollout.prompt.ids)
    slow = SlowSequence(
        SPARSE, prompt_len, loaded.shape.windows, loaded.shape.scales, keys[:, :, :0], queries[:, :, :0]
    )
    for time, kept in zip(times, rollout.kept_positions, strict=True):
        slow.grow(keys[:, :, slow.seen : time], queries[:, :, slow.seen : time])
        importance = slow.fire()
        for layer, head in slow.places:
            got, held = set(kept[layer, head].tolist()), slow.held[layer, head]
            live, protected = slow.live(layer, head), slow.protected(layer, head)
            worth = importance[layer, head]
            left = SPARSE.target(prompt_len, 0) - len(protected)
            free = sorted((p for p in live if p not in protected), key=lambda p: -worth[p])
            wanted = protected | {*free[:left]}
            lowest = min((worth[p] for p in free[:left]), default=0.0)
            wrong = {p for p in (got ^ wanted) & {*held} if p not in live or abs(worth[p] - lowest) > 1e-5}
            missing = wanted - got if len(live) <= SPARSE.budget else wrong & {*live}
            assert not missing, f"layer {layer}, head {head}: other entries are kept after {time} tokens: {missing}"
        slow.keep({place: kept[place].tolist() for place in slow.places})


def masked_twin(eager: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The model with its family's eager attention under a mask for each layer and KV head."""
    twin = copy.deepcopy(eager)
    twin.set_attn_implementation("masked_eager")
    return twin


def _masked_eager(module, query, key, value, attention_mask, visible=None, seen=None, **kwargs):
    seen[module.layer_idx] = (query[0], key[0])
    hidden = ~visible[module.layer_idx].repeat_interleave(query.shape[1] // key.shape[1], dim=0)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None]
    own = sys.modules[type(module).__module__].eager_attention_forward
    return own(module, query, key, value, mask, **kwargs)


transformers.AttentionInterface.register("masked_eager", _masked_eager)


def check_sparse_cache(loaded: LoadedModel, prompts: list[list[int]], rollouts: list[Rollout]) -> None:
    tokens, logprobs = generate(loaded.model, prompts, SparseCache(SPARSE), max_new_tokens=NUM_TOKENS)
    same = 0
    for row, rollout in enumerate(rollouts):  # until rounding takes another token
        equal = (tokens[row] == rollout.token_ids).int().cumprod(0).bool()
        same += int(equal.sum())
        off = (logprobs[row] - rollout.sampler_logprobs)[equal].abs().max()
        assert off <= CLOSE, f"log-probs under a SparseCache are off by {off:.1e}"
    assert same >= 0.9 * len(rollouts) * NUM_TOKENS, "a SparseCache takes other tokens"


def check_gradient(loaded: LoadedModel, eager: transformers.PreTrainedModel, rollouts: list[Rollout]) -> None:
    """One update with several rollouts in a row of the learner, against autograd one rollout at a time."""
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    total = sum(
        -advantage * chosen_logprobs(eager, rollout).mean() / len(rollouts)
        for advantage, rollout in zip(advantages, rollouts, strict=True)
    )
    learnt = {name: parameter for name, parameter in eager.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(total, [*learnt.values()], allow_unused=True)
    expected = dict(zip(learnt, gradients, strict=True))
    masters = MasterWeights(loaded.model)
    before = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    update(
        Learner(Head(loaded.model), torch.optim.SGD(masters.masters, lr=1.0), masters),
        rollouts, advantages, [0, 0, 1], PRESETS["none"], LossConfig(aggregation="sequence_mean"),
        UpdateConfig(max_grad_norm=1e9), temperature=1.0, max_length=NUM_TOKENS, generator=torch.Generator(),
    )  # fmt: skip
    largest = max(float(g.abs().max()) for g in gradients if g is not None)
    for name, parameter in loaded.model.named_parameters():
        got = before[name] - parameter.detach()
        wanted = expected.get(name)
        wanted = torch.zeros_like(got) if wanted is None else wanted
        off = (got - wanted).abs().max() / largest
        assert off <= CLOSE, f"the gradient of {name} is off by {off:.1e} of the largest"
