# SPDX-License-Identifier: Apache-2.0
"""The command: what it writes, and one clear sentence with exit code 2 for whatever the user can mend."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest
from commands import assert_one_sentence, run
from guarded_run import ERRORS
from transformers import AutoConfig, AutoModelForCausalLM

from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.report.progress import ProgressLine
from sparse_rl.rollout import Engine

TINY = ["generate", "--model", "tiny"]
SHORT = ["--sampling.stop_ids", "[]", "--sampling.max_tokens", "12"]
SPARSE = ["--kv.policy", "rkv", "--kv.budget", "16", "--kv.interval", "8"]


def test_generate_writes_one_json_line_a_sample():
    code, out, err = run(*TINY, "ab", "cde", "--sampling.n", "2", *SHORT, *SPARSE)
    assert code == 0
    rows = sorted((json.loads(line) for line in out.splitlines()), key=lambda row: (row["index"], row["sample"]))
    assert [(row["prompt"], row["sample"]) for row in rows] == [("ab", 0), ("ab", 1), ("cde", 0), ("cde", 1)]
    for row in rows:
        assert len(row["token_ids"]) == len(row["sampler_logprobs"]) == 12
        assert row["finish_reason"] == "length" and len(row["kv"]["held"]) == 11
    assert "tok/s" in err and "rows in flight" in err and "KV held" in err


def test_without_a_model_it_is_one_that_writes_text(monkeypatch):
    def load(name, **_):
        raise ValueError(f"{name} is asked for")

    monkeypatch.setattr("sparse_rl.model.load.load", load)
    assert_one_sentence(run("generate", "Once upon a time"), "smollm2 is asked for")


def test_prompts_from_a_text_file_jsonl_and_stdin(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("{one}\n\ntwo\n")
    _, out, _ = run(*TINY, "--prompts", str(tmp_path / "a.txt"), *SHORT)
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["{one}", "two"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "x\\ny"}\n')
    _, out, _ = run(*TINY, "--prompts", str(tmp_path / "a.jsonl"), *SHORT)
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["x\ny"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufefffrom stdin\n".encode())))
    _, out, _ = run(*TINY, *SHORT)
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["from stdin"]


def test_chat_messages_use_the_models_template(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}]}) + "\n")
    arguments = [*TINY, "--prompts", str(tmp_path / "a.jsonl"), *SHORT]
    _, out, _ = run(*arguments, "--model", str(tmp_path / "model"))
    assert json.loads(out)["prompt"] == "user: hi\nassistant:"
    code, _, err = run(*arguments)
    assert code == 2 and "no chat template" in err
    tokenizer.chat_template = "{{ raise_exception('only users here') }}"
    tokenizer.save_pretrained(tmp_path / "model")
    code, _, err = run(*arguments, "--model", str(tmp_path / "model"))
    assert code == 2 and "chat template refuses" in err


def test_compare_shows_both_and_the_overlap_of_every_token(tmp_path):
    output = tmp_path / "out.jsonl"
    prompt = "a prompt of more than sixteen tokens"
    code, out, _ = run(*TINY, prompt, "--compare", "--output", str(output), *SHORT, *SPARSE)
    assert code == 0 and "dense" in out and "sparse" in out and "overlap mean" in out and "KV saved" in out
    row = json.loads(output.read_text())
    assert len(row["overlap"]) == len(row["dense_logprobs"]) == 12
    assert all(0.0 <= value <= 1.0 for value in row["overlap"])
    assert row["overlap"][0] == pytest.approx(1.0, abs=1e-5), "the first token comes from the dense prefill"
    assert min(row["overlap"]) < 0.99
    assert "overlap_upper" not in row, "exact on a small vocabulary"
    peaks = re.search(r"peak (\d+) entries against (\d+), \d+ cuts$", out, re.MULTILINE)
    assert int(peaks[1]) < int(peaks[2]), "the other side is dense"


@pytest.mark.parametrize("compare", [[], ["--compare"]])
def test_a_cache_that_was_never_cut_is_told_of(compare):
    uncut = ["--kv.policy", "streaming", "--kv.budget", "8"]  # of which the interval is 128
    code, _, err = run(*TINY, "ab", *compare, *SHORT, *uncut)
    assert code == 0 and "no cache was cut: none grew to kv.budget + kv.interval, 8 + 128 entries" in err
    assert "no cache was cut" not in run(*TINY, "a prompt of more than sixteen tokens", *SHORT, *SPARSE)[2]


def test_compare_of_a_policy_that_chooses_pages():
    chosen = ["--kv.policy", "pages_mean", "--kv.budget", "48"]
    code, out, err = run(*TINY, "a prompt of many tokens " * 6, "--compare", *SHORT, *chosen)
    assert code == 0, err
    assert int(re.search(r"KV saved 0 %, read (\d+) %", out)[1]) < 100, "it holds everything and reads less"


def test_compare_of_a_large_vocabulary_gives_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr("sparse_rl.objective.mismatch.EXACT_VOCABULARY", 10)
    output = tmp_path / "out.jsonl"
    arguments = ["a prompt of more than sixteen tokens", "--sampling.temperature", "0.5", "--output", str(output)]
    _, out, _ = run(*TINY, *arguments, "--compare", *SHORT, *SPARSE)
    row = json.loads(output.read_text())
    assert "lower bound" in out
    assert all(a <= b for a, b in zip(row["overlap"], row["overlap_upper"], strict=True))
    assert row["overlap_upper"][0] == pytest.approx(1.0, abs=1e-4), "the same temperature on both sides"
    assert row["dense_logprobs"][0] == pytest.approx(row["sampler_logprobs"][0], abs=1e-4)


def test_logits_that_are_not_finite_exit_with_1(monkeypatch):
    def fail(*args, **kwargs):
        raise FloatingPointError("not finite")

    monkeypatch.setattr(Engine, "generate", fail)
    code, _, err = run(*TINY, "a")
    assert code == 1 and "not finite" in err


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_is_one_sentence(error, monkeypatch):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(Engine, "generate", fails)
    code, _, err = run("generate", "hello", "--model", "tiny")
    assert code == 2 and err.startswith("sparse-rl: error: out of memory (") and "engine.rows" in err
    monkeypatch.setattr(Engine, "generate", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("a fault of ours")))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run("generate", "hello", "--model", "tiny")


def test_dtype_is_used():
    rows = [json.loads(run(*TINY, "abc", "--dtype", d, *SHORT)[1]) for d in ("float32", "bfloat16")]
    assert rows[0]["sampler_logprobs"] != rows[1]["sampler_logprobs"]


def test_settings_from_a_file_and_flags_over_it(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("kv: {policy: streaming, budget: 8, interval: 4}\nsampling: {max_tokens: 5, stop_ids: []}\n")
    _, out, _ = run(*TINY, "abc", "--config", str(config), "--sampling.max_tokens", "20")
    row = json.loads(out)
    assert len(row["token_ids"]) == 20 and max(row["kv"]["held"]) == 12


@pytest.mark.parametrize(
    "command",
    [
        [*TINY, "abc"],
        ["eval", "--models", "tiny", "--benchmarks", "lookup", "--dry-run"],
        ["calibrate", "--model", "tiny", "--dry-run"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_reads_files_as_train_does(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("engine: {rows: 0}\n")
    (tmp_path / "own.yaml").write_text("base: base.yaml\ndevice: cpu\n")
    (tmp_path / "null.yaml").write_text("engine: null\n")
    (tmp_path / "warm.yaml").write_text("data: {}\ntrainer: {}\n")
    for names, said in (
        (["own.yaml"], "engine.rows is 0; it must be at least 1"),
        (["null.yaml"], "must be a table of keys and values"),
        (["nowhere.yaml"], "--config 'nowhere.yaml' is not a file; check the path."),
        (["default.yaml"], "settings, which belong to `sparse-rl train`; give it there."),
        (["warm.yaml"], "warm.yaml has data settings, which belong to `sparse-rl sft`; give it there."),
        ([], "--config needs the name of a file or a recipe."),
    ):
        assert_one_sentence(run(*command, "--config", *names), said)


def test_one_text_tells_of_files():
    texts = set()
    for command in ("train", "sft", "plan", "eval", "generate", "calibrate"):
        found = re.search(r"  --config CONFIG +(.*?)\n +--", run(command, "--help")[1], flags=re.DOTALL)
        texts.add(" ".join(found[1].split()))
    assert len(texts) == 1 and "a recipe's name" in texts.pop()


def test_stop_strings_and_ids_as_flags():
    _, out, _ = run(*TINY, "abc", "--sampling.max_tokens", "300", "--sampling.stop", "é")
    assert json.loads(out)["finish_reason"] in ("stop", "stop_string")
    _, out, _ = run(*TINY, "--sampling.stop", '["a", "b"]', "--sampling.max_tokens", "300", "abc")
    assert json.loads(out)["completion"][-1] in "ab" or json.loads(out)["finish_reason"] == "stop"
    every = str(list(range(259)))
    _, out, _ = run(*TINY, "abc", "--sampling.max_tokens", "300", "--sampling.stop_ids", every)
    assert len(json.loads(out)["token_ids"]) == 1


@pytest.fixture(scope="module")
def refused_models(tmp_path_factory) -> dict[str, str]:
    """Folders of models that cannot be sampled from."""
    folder = tmp_path_factory.mktemp("models")
    small = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    cases = {
        "convolution": ("lfm2", {**small, **heads, "layer_types": ["conv", "full_attention"]}),
        "two attentions": ("diffllama", {**small, **heads}),
    }
    for name, (model_type, settings) in cases.items():
        config = AutoConfig.for_model(model_type, **settings)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return {name: str(folder / name) for name in cases}


@pytest.mark.parametrize(("name", "message"), [("convolution", "conv"), ("two attentions", "once in order")])
def test_unsupported_models(name, message, refused_models):
    code, out, err = run(*TINY, "a", "--model", refused_models[name])
    assert (code, out) == (2, "") and message in err.splitlines()[-1]


BAD = {
    "no command": ([], "usage"),
    "unknown command": (["genrate", "a"], "unknown command 'genrate' (did you mean 'generate'?); the"),
    "wrong model path": ([*TINY, "a", "--model", "./no/such/model"], "neither a folder nor a hub name"),
    "budget below protected": (
        [*TINY, "a", "--kv.policy", "rkv", "--kv.budget", "4"],
        "kv.budget is 4, but the protected entries alone are 8 (sinks 0 + newest 8); raise it to 8",
    ),
    "unknown policy": ([*TINY, "a", "--kv.policy", "rvk"], "did you mean 'rkv'"),
    "policy without that key": ([*TINY, "a", "--kv.policy", "streaming", "--kv.window", "4"], "not a setting"),
    "unknown key": ([*TINY, "a", "--kv.bugdet", "4"], "did you mean --kv.budget"),
    "a word for a number": ([*TINY, "a", "--kv.sinks", "many"], "kv.sinks is 'many', which is not of type int"),
    "a word for a budget": (
        [*TINY, "a", "--kv.policy", "rkv", "--kv.budget", "many"],
        "kv.budget is 'many', which is neither a whole number nor a file nor a published schedule",
    ),
    "a word for a choice": ([*TINY, "a", "--kv.policy", "rkv", "--kv.order", "up"], "kv.order is 'up'; choose"),
    "a word for a flag": ([*TINY, "a", "--kv.protect_prompt", "maybe"], "kv.protect_prompt is 'maybe'"),
    "long prompt": ([*TINY, "a" * 9000], "the model's context is 8192"),
    "empty prompt": ([*TINY, ""], "prompt 0: the prompt is empty"),
    "small pool": (
        [*TINY, "a", "--engine.pool_pages", "2", "--sampling.max_tokens", "999"],
        "set engine.pool_pages to at least 16",
    ),
    "missing file": ([*TINY, "--prompts", "no-such-file.txt"], "no-such-file.txt"),
    "unknown dtype": ([*TINY, "a", "--dtype", "float12"], "dtype 'float12'"),
    "unknown device": ([*TINY, "a", "--device", "nonsense"], "nonsense"),
    "prompts twice": ([*TINY, "a", "--prompts", "b.txt"], "use one"),
    "compare dense": ([*TINY, "a", "--compare"], "is dense"),
    "compare with top": ([*TINY, "a", "--compare", *SPARSE, "--sampling.top_logprobs", "3"], "leave out"),
    "abbreviation": ([*TINY, "a", "--kv.bud", "16"], "unknown option 'kv.bud'"),
    "tiny temperature": ([*TINY, "a", "--sampling.temperature", "1e-39"], "sampling.temperature"),
    "not unicode": ([*TINY, "a\ud800"], "the tokenizer cannot read"),
    "huge pool": ([*TINY, "a", "--engine.pool_pages", "1000000000000"], "cannot be allocated"),
    "stop id out of range": ([*TINY, "a", "--sampling.stop_ids", "300"], "sampling.stop_ids has 300"),
    "missing output folder": ([*TINY, "a", "--output", "/no/such/folder/x.jsonl"], "/no/such/folder/x.jsonl"),
    "prompt file is a folder": ([*TINY, "--prompts", "/"], "Is a directory"),
    "compare truncated": ([*TINY, "a", "--compare", *SPARSE, "--sampling.top_p", "0.9"], "whole distribution"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case):
    arguments, message = BAD[case]
    code, out, err = run(*arguments)
    assert code == 2
    assert message in (err or out)
    if err:
        assert len(err.strip().splitlines()) == 1 and err.startswith("sparse-rl: error: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b'{"prompt": 3}\n', "line 1"),
        (b'{"prompt": "a"}\n\n\nnot json\n', "line 4"),
        (b"[" * 100_000, "line 1"),
        (b"\x80\x81", "not text in UTF-8"),
    ],
    ids=["empty", "no prompt", "not json", "nested", "binary"],
)
def test_bad_prompt_files(content, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    code, _, err = run(*TINY, "--prompts", str(tmp_path / "a.jsonl"))
    assert code == 2 and message in err


@pytest.mark.parametrize("setting", ["max_tokens", "temperature", "n", "seed", "stop"])
def test_rows_with_settings_of_their_own_are_refused(setting, tmp_path):
    rows = [{"prompt": "a", "answer": "of other use"}, {"prompt": "b", setting: 1}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = f"line 2 of {tmp_path / 'a.jsonl'} has its own {setting}, but all prompts of a call share their settings"
    assert_one_sentence(run(*TINY, "--prompts", str(tmp_path / "a.jsonl")), said, f"--sampling.{setting}")


def test_prompts_with_unusual_characters(tmp_path):
    """A byte-order mark, CRLF, separators that are no newline, brackets that rich would read as markup."""
    (tmp_path / "a.txt").write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n'.encode())
    _, out, _ = run(*TINY, "--prompts", str(tmp_path / "a.txt"), *SHORT)
    assert sorted(json.loads(line)["prompt"] for line in out.splitlines()) == ["a\u2028b", "c"]
    code, out, _ = run(*TINY, "[/x] [bold]hi[/bold] long enough", "--compare", *SHORT, *SPARSE)
    assert code == 0 and "[/x] [bold]hi[/bold]" in out


def test_output_is_json_under_truncation():
    arguments = ["--sampling.top_k", "2", "--sampling.top_logprobs", "4"]
    _, out, _ = run(*TINY, "abc", *SHORT, *arguments)
    row = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["top_logprobs"][0][2:] == [None, None]


def test_what_had_finished_is_written_when_a_run_is_interrupted(tmp_path, monkeypatch):
    shown = ProgressLine.show

    def interrupt(self, progress):
        shown(self, progress)
        if progress.num_finished == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLine, "show", interrupt)
    output = tmp_path / "out.jsonl"
    arguments = ["--engine.rows", "1", "--sampling.n", "5", "--output", str(output)]
    code, _, err = run(*TINY, "abc", *SHORT, *arguments)
    assert code == 130 and "interrupted; what had finished was written." in err
    assert len(output.read_text().splitlines()) == 3


def test_a_closed_pipe_is_no_error():
    command = [sys.executable, "-m", "sparse_rl", "data", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv: 3\n", "must be a table"),
        ("sampling: {stop: 3, stop_ids: []}\n", "sampling.stop"),
        ("sampling: {max_tokens: many}\n", "sampling.max_tokens is 'many'"),
        ("sampling: {stop: null}\n", "sampling.stop is null"),
        ("engine: {rows: null}\n", "engine.rows is null"),
        ("model: null\n", "model is null"),
        ("prompt: hi\n", "prompts"),
        ("compare: maybe\n", "compare"),
    ],
)
def test_wrong_types_in_a_config_file(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    code, _, err = run("generate", "a", "--config", str(tmp_path / "c.yaml"))
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def test_unknown_keys_in_a_config_file(tmp_path):
    (tmp_path / "c.yaml").write_text("kv: {bugdet: 3}\n")
    code, _, err = run(*TINY, "a", "--config", str(tmp_path / "c.yaml"))
    assert code == 2 and "kv.bugdet" in err and "kv.budget" in err


def test_existing_output_is_never_overwritten(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    code, _, err = run(*TINY, "a", "--output", str(output), *SHORT)
    assert code == 2 and "not overwritten" in err and output.read_text() == "precious"


def test_a_failed_run_leaves_no_empty_file(tmp_path):
    output = tmp_path / "out.jsonl"
    code, _, _ = run(*TINY, "a", "--output", str(output), "--model", "./nowhere")
    assert code == 2 and not output.exists()
