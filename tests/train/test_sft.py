# SPDX-License-Identifier: Apache-2.0
"""Supervised learning: the loss and its gradient by hand, what a run writes and keeps, a stop and a resume."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from small_run import small_trainer, without_times
from small_sft import TEXTS, fresh, rows, small_sft
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from sparse_rl.kv import Full
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.model.tiny import tiny_model
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.runfolder import lock
from sparse_rl.score.head import Head
from sparse_rl.tasks.supervised import Example, Examples
from sparse_rl.train import Learner, OptimizerConfig, SFTConfig, SFTTrainer, UpdateConfig, checkpoint
from sparse_rl.train.callbacks import Callbacks
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.sft import end_ids, learn, mean_nll
from sparse_rl.types import Prompt


def random_rows(count: int, seed: int) -> list[Example]:
    draw = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(256) for _ in range(draw.randint(low, high))]

    return [Example(prompt=Prompt(ids=tuple(ids(1, 40))), token_ids=torch.tensor(ids(1, 30))) for _ in range(count)]


def learnt(
    family: str, examples: list[Example], max_tokens: int, max_grad_norm: float = 1e9
) -> tuple[float, list[torch.Tensor]]:
    """The loss, and the gradient as what plain gradient descent at rate 1 takes off the weights."""
    model = fresh(family, torch.float64).model
    masters = MasterWeights(model)
    before = [master.detach().clone() for master in masters.masters]
    learner = Learner(Head(model), torch.optim.SGD(masters.masters, lr=1.0), masters)
    metrics = learn(learner, examples, max_tokens, max_grad_norm)
    return metrics["loss"], [old - new.detach() for old, new in zip(before, masters.masters, strict=True)]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.some(1)
def test_loss_and_gradient_are_cross_entropy_over_completion_tokens(family, seed):
    """Against transformers' own attention, a row at a time, in fp64; our log-probs are rounded to fp32."""
    examples = random_rows(7, seed)
    loss, gradient = learnt(family, examples, max_tokens=100)
    reference = tiny_model(family, dtype=torch.float64, attn_implementation="sdpa")
    total = torch.zeros((), dtype=torch.float64)
    for example in examples:
        ids = torch.tensor([[*example.prompt.ids, *example.token_ids.tolist()]])
        logits = reference(ids).logits[0, len(example.prompt.ids) - 1 : -1]
        total = total + cross_entropy(logits, example.token_ids, reduction="sum")
    expected = total / sum(len(example.token_ids) for example in examples)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for ours, parameter in zip(gradient, reference.parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad, rtol=1e-5, atol=1e-6 * float(parameter.grad.abs().max()))


def test_packed_rows_are_learnt_as_if_one_by_one(seed):
    examples = random_rows(9, seed)
    results = {max_tokens: learnt("mistral", examples, max_tokens) for max_tokens in (1, 64, 10_000)}
    alone, alone_gradient = results[1]
    for loss, gradient in results.values():
        assert loss == pytest.approx(alone, rel=1e-6)
        for ours, theirs in zip(gradient, alone_gradient, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))
    head = Head(fresh("mistral", torch.float64).model)
    assert mean_nll(head, examples, 64) == pytest.approx(alone, rel=1e-6), "before the update"


def test_gradients_are_clipped_to_the_norm(seed):
    examples = random_rows(3, seed)
    _, free = learnt("llama", examples, 100)
    norm = float(torch.stack([gradient.norm() for gradient in free]).norm())
    _, clipped = learnt("llama", examples, 100, max_grad_norm=norm / 4)
    assert all(torch.allclose(ours, whole / 4, rtol=1e-5) for ours, whole in zip(clipped, free, strict=True))


def test_prompt_tokens_get_no_gradient():
    """Of the last hidden states only those that predict a completion token get one."""
    loaded, found = fresh(dtype=torch.float64), []

    def watch(module, args, output) -> None:
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(found.append)

    masters = MasterWeights(loaded.model)
    learner = Learner(Head(loaded.model), torch.optim.SGD(masters.masters, lr=1.0), masters)
    loaded.model.get_decoder().register_forward_hook(watch)
    examples = [
        Example(prompt=Prompt(ids=(1, 2, 3)), token_ids=torch.tensor([4, 5])),
        Example(prompt=Prompt(ids=(6,)), token_ids=torch.tensor([7, 8, 9])),
    ]
    learn(learner, examples, 100, 1.0)
    (gradient,) = found  # p p p o o p o o o
    assert (gradient[0] != 0).any(dim=-1).tolist() == [False, False, True, True, False, True, True, True, False]


def test_four_rows_are_learnt_by_heart(tmp_path):
    loaded = fresh()
    examples = rows(loaded)
    config = SFTConfig(output_dir=str(tmp_path / "run"), epochs=50, rows_per_step=4, eval_every=25, save_every=0)
    optimizer = OptimizerConfig(learning_rate=3e-3, schedule="cosine")
    trainer = SFTTrainer(loaded, Examples(train=examples, eval=examples), config=config, optimizer=optimizer)
    trainer.train()
    lines = read_log(tmp_path / "run" / "metrics.jsonl")
    assert trainer.config.steps == 50 == lines[-1]["epoch"]
    assert lines[0]["eval/loss"] > 3 and lines[-1]["eval/loss"] < 0.1
    engine = Engine(loaded, Full(), EngineConfig(rows=4))
    prompts = [example.prompt for example in examples]
    written = engine.generate(prompts, Sampling(temperature=0.0, max_tokens=40))
    assert [loaded.tokenizer.decode(rollout.token_ids) for rollout in written] == [f"{t}<eos>" for t in TEXTS.values()]
    assert {rollout.finish_reason for rollout in written} == {"stop"}


# A run's folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never stopped."""
    trainer = small_sft(tmp_path_factory.mktemp("sft") / "run")
    trainer.train()
    return trainer


def assert_same(got: SFTTrainer, expected: SFTTrainer) -> None:
    ours, theirs = got.run.folder, expected.run.folder
    assert without_times(ours) == without_times(theirs)
    names = [path.name for path in checkpoint.checkpoints(theirs)]
    assert [path.name for path in checkpoint.checkpoints(ours)] == names and len(names) == 2
    weights, same = (load_file(folder / names[-1] / "model.safetensors") for folder in (ours, theirs))
    assert all(torch.equal(weights[name], same[name]) for name in same)
    masters, same = (trainer.learner.masters.state_dict() for trainer in (got, expected))
    assert all(master.dtype == torch.float32 and torch.equal(master, same[name]) for name, master in masters.items())
    state, same = (trainer.learner.optimizer.state_dict()["state"] for trainer in (got, expected))
    assert state.keys() == same.keys() and len(state) > 10
    for key in same:
        assert all(torch.equal(state[key][name], same[key][name]) for name in same[key])


@pytest.mark.parametrize(
    ("point", "at"), [("learn", None), ("mean_nll", None), ("mean_nll", 4), ("checkpoint.save", None)]
)
@pytest.mark.some(2)
def test_a_stopped_run_resumes_bit_for_bit(whole, tmp_path, monkeypatch, point, at):
    """In an update, an evaluation or a save, drawn anew each time; and in the evaluation of the last and best step."""
    name = "sparse_rl.train.checkpoint.save" if point == "checkpoint.save" else f"sparse_rl.train.sft.{point}"
    at = at or random.randint(1, {"learn": 6, "mean_nll": 4, "checkpoint.save": 6}[point])
    print(f"stopped at {point} {at}")
    original = checkpoint.save if point == "checkpoint.save" else {"learn": learn, "mean_nll": mean_nll}[point]
    calls: list[int] = []

    def stop(*args):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(name, stop)
        with pytest.raises(KeyboardInterrupt):
            small_sft(tmp_path / "run").train()
    resumed = small_sft(tmp_path / "run", resume_from_checkpoint=True)
    resumed.train()
    assert_same(resumed, whole)


def test_a_run_writes_what_it_did(whole):
    lines = read_log(whole.run.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(7))
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 2, 4, 6]
    assert all(line["eval/perplexity"] == pytest.approx(math.exp(line["eval/loss"])) for line in lines[::2])
    rates = [line["learning_rate"] for line in lines[1:]]
    assert rates == pytest.approx([1e-3 * factor for factor in (0.5, 1.0, 1.0, 0.75, 0.5, 0.25)])
    assert lines[4]["epoch"] == 3.0 and lines[4]["num_tokens"] == 3 * sum(row.num_tokens for row in whole.data.train)
    record = json.loads((whole.run.folder / "run.json").read_text())
    assert record["config"]["trainer"]["rows_per_step"] == 3 and record["config"]["optimizer"]["warmup"] == 2


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path, monkeypatch):
    seen: list[int] = []

    def record(learner, examples, *args):
        seen.extend(int(example.prompt.text) for example in examples)
        return learn(learner, examples, *args)

    monkeypatch.setattr("sparse_rl.train.sft.learn", record)
    orders = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        loaded, seen = fresh(num_hidden_layers=1), []
        data = Examples(train=rows(loaded, {str(i): "x" for i in range(10)}))
        config = SFTConfig(output_dir=str(tmp_path / name), epochs=2, rows_per_step=4, seed=seed, save_every=0)
        trainer = SFTTrainer(loaded, data, config=config)
        trainer.train()
        assert trainer.step == 5 and sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
        assert seen[:10] != seen[10:]
        orders.append(seen)
    assert orders[0] == orders[1] != orders[2]
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "a")] == ["checkpoint-5"], "the last in any case"
    assert not any(key.startswith("eval/") for line in read_log(tmp_path / "a" / "metrics.jsonl") for key in line)


def test_the_checkpoint_of_the_lowest_held_out_loss_is_kept(tmp_path, monkeypatch):
    losses = iter([5.0, 3.0, 1.0, 2.0, math.nan, 1.0, 4.0])
    monkeypatch.setattr("sparse_rl.train.sft.mean_nll", lambda *_: next(losses))
    trainer = small_sft(tmp_path / "run", eval_every=1)
    trainer.train()
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-6"]
    assert trainer.run.best == {"checkpoint": "checkpoint-2", "value": 1.0}
    losses = iter([0.5])
    more = small_sft(tmp_path / "run", eval_every=1, steps=7, resume_from_checkpoint=True)
    more.train()
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-6", "checkpoint-7"]
    assert more.run.best["checkpoint"] == "checkpoint-7", "the best was remembered over the resume"


def test_a_checkpoint_loads_with_transformers_and_here(whole):
    folder = checkpoint.checkpoints(whole.run.folder)[-1]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    trained = whole.loaded.model.state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in model.state_dict().items())
    assert tokenizer("abc").input_ids == whole.loaded.tokenizer("abc").input_ids
    assert mean_nll(Head(load(str(folder)).model), whole.data.eval, 100) == pytest.approx(
        read_log(whole.run.folder / "metrics.jsonl")[-1]["eval/loss"], abs=0.01
    )


def test_a_folder_belongs_to_one_run_of_one_kind(whole, tmp_path):
    folder = whole.run.folder
    with pytest.raises(ValueError, match=r"has a run in it \(run.json\); resume it with"):
        small_sft(folder).train()
    with pytest.raises(ValueError, match="has a run of another kind in it, without task settings"):
        small_trainer(folder, resume_from_checkpoint=True).train()
    small_trainer(tmp_path / "rl", steps=0).train()
    with pytest.raises(ValueError, match="has a run of another kind in it, without data settings"):
        small_sft(tmp_path / "rl", resume_from_checkpoint=True).train()
    with pytest.raises(ValueError, match="the run has 2 steps, but checkpoint-6 is beyond them"):
        small_sft(folder, steps=2, resume_from_checkpoint=True).train()
    with lock(folder), pytest.raises(ValueError, match="another process is training in"):
        small_sft(folder, resume_from_checkpoint=True).train()
    assert_same(whole, whole)  # none of them has removed a checkpoint or cut a log


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path, caplog, monkeypatch):
    trainer = small_sft(tmp_path / "run", steps=1)
    before = {name: weight.clone() for name, weight in trainer.loaded.model.state_dict().items()}
    monkeypatch.setattr(
        "sparse_rl.train.sft.nll", lambda head, _: head.model.get_input_embeddings().weight.sum() * math.nan
    )
    monkeypatch.setattr("sparse_rl.train.sft.mean_nll", lambda *_: 1.0)
    trainer.train()
    assert "changes nothing" in caplog.text
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.loaded.model.state_dict().items())


def test_callbacks_of_transformers_may_watch(tmp_path):
    pytest.importorskip("accelerate")
    seen: list[tuple[str, int]] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            seen.append(("begin", state.max_steps))

        def on_evaluate(self, args, state, control, metrics, **_):
            seen.append(("eval", state.global_step))

    small_sft(tmp_path / "run", steps=3, observers=(Callbacks(callbacks=(Watch(),)),)).train()
    assert seen == [("begin", 3), ("eval", 0), ("eval", 2), ("eval", 3)]


# What is refused


def test_more_rows_a_step_than_there_are_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.rows_per_step is 5, but there are 4 rows"):
        small_sft(tmp_path / "run", rows_per_step=5)


def test_tokens_the_model_does_not_have_are_refused(tmp_path):
    loaded = fresh(vocab_size=200, pad_token_id=None, bos_token_id=None, eos_token_id=199)
    examples = [Example(prompt=Prompt(ids=(1,)), token_ids=torch.tensor([200]))]
    config = SFTConfig(output_dir=str(tmp_path / "run"), rows_per_step=1)
    with pytest.raises(ValueError, match="the rows have token 200, but the model has 200 tokens"):
        SFTTrainer(loaded, Examples(train=examples), config=config)


@pytest.mark.parametrize(
    "setting",
    [
        {"epochs": 0.0}, {"epochs": math.inf}, {"steps": -1}, {"rows_per_step": 0}, {"max_tokens": 0},
        {"max_grad_norm": 0.0}, {"seed": 1 << 32}, {"eval_every": -1}, {"save_total_limit": 0}, {"output_dir": ""},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_out_of_range_is_refused(setting):
    with pytest.raises(ValueError, match=f"trainer.{next(iter(setting))} is "):
        SFTConfig(**setting)


@pytest.mark.parametrize("config", [SFTConfig, UpdateConfig])
def test_a_gradient_may_be_left_unclipped(config):
    assert config(max_grad_norm=math.inf).max_grad_norm == math.inf
    for norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"max_grad_norm is {norm}; it must be above 0"):
            config(max_grad_norm=norm)


@pytest.mark.parametrize(
    ("own", "known", "expected"),
    [(7, (5, 7), (7, 5, 7)), (7, (), (7,)), (9, (5, 7), (5, 7)), (None, (5,), (5,))],
)
def test_the_tokenizers_end_token_ends_completions_if_the_sampler_stops_there(own, known, expected):
    generation = SimpleNamespace(eos_token_id=list(known) or None)
    loaded = SimpleNamespace(
        model=SimpleNamespace(generation_config=generation), tokenizer=SimpleNamespace(eos_token_id=own)
    )
    assert end_ids(loaded) == expected


def test_a_model_without_an_end_token_is_refused():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    with pytest.raises(ValueError, match="the model has no end token"):
        end_ids(SimpleNamespace(model=model, tokenizer=SimpleNamespace(eos_token_id=None)))
