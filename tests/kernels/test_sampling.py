# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend on their key alone; tokens that follow the distribution whose log-prob is reported."""

from __future__ import annotations

import pytest
import torch

from sparse_rl.kernels.sampling import (
    GOLDEN,
    MIX_1,
    MIX_2,
    WORD,
    mix,
    request_key,
    sample,
    sample_ref,
    scale_ref,
    token_keys_ref,
    truncate_ref,
    uniform_ref,
)

CLOSE_CALL = 1e-4  # between the two best perturbed values: either may be drawn
LIMITS = (-(1 << 63), -(1 << 63) + 1, -1, 0, 1, (1 << 63) - 1)


def pytest_generate_tests(metafunc):
    on_gpu = metafunc.config.getoption("--device") != "cpu"
    if "size" in metafunc.fixturenames:
        metafunc.parametrize("size", [5, 258, 4096, 5000] + [151_936] * on_gpu)
    if "dtype" in metafunc.fixturenames:  # Triton's interpreter has no bf16
        metafunc.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * on_gpu)


@pytest.fixture
def sample_triton():
    return pytest.importorskip("sparse_rl.kernels.sampling_triton", exc_type=ImportError).sample_triton


@pytest.fixture
def fresh(device, seed):
    """fresh(rows, size, dtype): logits, request keys and indices that no earlier run has seen."""
    generator = torch.Generator().manual_seed(seed)

    def build(rows, size, dtype=torch.float32):
        keys = torch.randint(LIMITS[0], LIMITS[-1], (rows,), generator=generator)
        logits = (3 * torch.randn(rows, size, generator=generator)).to(dtype)
        return logits.to(device), keys.to(device), torch.arange(rows, device=device)

    return build


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([request_key(seed, request) for request in range(count)])


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def signed(word: int) -> int:
    return (word & WORD) - ((word & 1 << 63) << 1)


def token_key(request_key: int, index: int) -> int:
    return signed(mix((request_key + (index + 1) * GOLDEN) & WORD))


def request_key_of(token_key: int, index: int) -> int:
    """The request key whose token has this key: the mixing undone."""
    word = token_key & WORD
    for shift, factor in ((31, MIX_2), (27, MIX_1), (30, 1)):
        word ^= word >> shift ^ word >> 2 * shift
        word = word * pow(factor, -1, 1 << 64) & WORD
    return signed(word - (index + 1) * GOLDEN)


def assert_agrees(got, logits, keys, index, *, temperature, num_top=0, top_k=None, top_p=1.0):
    """Tokens, log-probs and top lists against fp64, tokens where the draw is no close call."""
    tokens, logprobs, top_ids, top_logprobs = got
    scaled = logits.double() / (temperature or 1.0)
    if top_k is not None or top_p < 1.0:  # what is kept is decided in fp32
        scaled = truncate_ref(scale_ref(logits, temperature), top_k, top_p).double()
    expected = scaled.log_softmax(-1)
    perturbed = scaled
    if temperature:
        u = uniform_ref(token_keys_ref(keys, index), logits.shape[1]).double()
        perturbed = scaled - (-torch.log1p(-u)).log()
    best = perturbed.topk(2).values
    clear = best[:, 0] - best[:, 1] > (CLOSE_CALL if temperature else 0.0)
    assert clear.float().mean() > 0.5  # the comparison below is not empty
    assert torch.equal(tokens[clear], perturbed.argmax(-1)[clear])
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected.gather(-1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)
    if not num_top:
        assert top_ids is None and top_logprobs is None
        return
    assert top_ids.dtype == torch.int64 and top_logprobs.dtype == torch.float32
    assert all(len(set(row)) == num_top for row in top_ids.tolist())
    largest = expected.sort(dim=-1, descending=True, stable=True).values[:, :num_top]
    for value in (largest, expected.gather(-1, top_ids)):
        torch.testing.assert_close(top_logprobs.double(), value, atol=1e-5, rtol=0)


def test_token_keys_equal_those_on_integers(device):
    pairs = [(key, index) for key in (*LIMITS, request_key(7, 3)) for index in (0, 1, 5, 1 << 31, (1 << 63) - 1)]
    got = token_keys_ref(*(torch.tensor(column, device=device) for column in zip(*pairs, strict=True)))
    assert got.tolist() == [token_key(*pair) for pair in pairs]
    assert [request_key_of(key, index) for key, (_, index) in zip(got.tolist(), pairs, strict=True)] == [
        key for key, _ in pairs
    ]


def test_uniform_equals_splitmix64_on_integers():
    key = token_key(request_key(7, 3), 5)
    expected = [(mix((key + column * GOLDEN) & WORD) >> 32) for column in range(1, 9)]
    got = uniform_ref(torch.tensor([key]), 8)[0].double() * 2.0**32 - 0.5
    assert got.tolist() == pytest.approx(expected, rel=1e-6)


def test_mix_matches_published_splitmix64():
    """The first outputs of SplitMix64 seeded with 1234567, as published with the generator."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + GOLDEN) & WORD
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_are_uniform_and_independent():
    u = uniform_ref(token_keys_ref(keys(400), zeros(400)), 1000).double()
    assert u.min() > 0.0 and u.max() <= 1.0
    assert abs(u.mean() - 0.5) < 4 / (12 * u.numel()) ** 0.5
    counts = torch.histc(u, bins=64, min=0.0, max=1.0)
    chi2 = ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum()
    assert chi2 < 63 + 5 * (2 * 63) ** 0.5
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):  # neighbouring requests, neighbouring tokens
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 5 / a.numel() ** 0.5


@pytest.mark.parametrize("index", [0, 9])
@pytest.mark.parametrize("triton", [False, True])
def test_a_uniform_that_would_round_to_one_does_not_break_the_draw(index, triton, device, request):
    """A key whose 59th uniform is the largest there is: the all but certain token 58 is drawn all the same."""
    draw = request.getfixturevalue("sample_triton") if triton else sample_ref
    key = 673480262790411271
    assert uniform_ref(torch.tensor([key]), 259)[0, 58] == 1.0 - 2.0**-24
    keys = torch.tensor([request_key_of(key, index)], device=device)
    logits = torch.zeros(1, 259, device=device)
    logits[0, 58] = 50.0
    for top_k in (None, 1):
        tokens, logprobs, _, _ = draw(logits, keys, torch.full_like(keys, index), temperature=1.0, top_k=top_k)
        assert tokens.tolist() == [58] and logprobs.item() == pytest.approx(0.0, abs=1e-6)


def test_keys_do_not_collide():
    seen = {token_key(request_key(seed, request), i) for seed in range(5) for request in range(40) for i in range(50)}
    assert len(seen) == 5 * 40 * 50


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_reported_logprobs(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    count = 40_000
    tokens, logprobs, ids, top = sample_ref(
        logits.repeat(count, 1), keys(count), zeros(count), temperature=temperature, num_top=5
    )
    expected = torch.softmax(logits / temperature, -1)
    torch.testing.assert_close(logprobs, expected.log()[tokens])
    torch.testing.assert_close(top[0], expected.log().sort(descending=True).values)
    assert ids[0].tolist() == [0, 1, 2, 3, 4]
    frequency = torch.bincount(tokens, minlength=5) / count
    assert ((frequency - expected).abs() < 4.5 * (expected * (1 - expected) / count).sqrt()).all()


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    together = sample_ref(logits, keys(6), torch.arange(6), temperature=1.0)
    for row in range(6):
        alone = sample_ref(logits[row : row + 1], keys(6)[row : row + 1], torch.tensor([row]), temperature=1.0)
        assert (alone[0], alone[1]) == (together[0][row], together[1][row])


def test_greedy_reports_the_logprob_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, logprobs, _, _ = sample_ref(logits, keys(1), zeros(1), temperature=0.0)
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


def test_truncation_by_hand():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = probabilities.log().repeat(2000, 1)
    # top_p 0.6: the best has mass 0.5 < 0.6, the second reaches 0.75; two tokens stay, renormalised.
    tokens, logprobs, _, _ = sample_ref(logits, keys(2000), zeros(2000), temperature=1.0, top_p=0.6)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, torch.tensor([2 / 3, 1 / 3]).log()[tokens])
    tokens, logprobs, _, _ = sample_ref(logits, keys(2000), zeros(2000), temperature=1.0, top_k=3)
    assert set(tokens.tolist()) == {0, 1, 2}
    torch.testing.assert_close(logprobs, (probabilities[:3] / 0.9).log()[tokens])
    # top_k first: {.5, .25, .15} renormalised to {.556, .278, .167}; 0.9 then needs all three, 0.8 only two.
    tokens, _, _, _ = sample_ref(logits, keys(2000), zeros(2000), temperature=1.0, top_k=3, top_p=0.8)
    assert set(tokens.tolist()) == {0, 1}
    tokens, _, _, _ = sample_ref(logits, keys(2000), zeros(2000), temperature=1.0, top_p=1e-9)
    assert set(tokens.tolist()) == {0}


def test_half_precision_logits_are_scored_in_fp32():
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logprobs, _, _ = sample_ref(logits, keys(3), zeros(3), temperature=1.0)
    assert logprobs.dtype == torch.float32
    expected = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


def test_the_smallest_uniform_is_not_zero():
    before_zero = (1 << 64) - GOLDEN  # the key whose first state is 0, which mixes to 0
    assert mix(0) == 0
    assert uniform_ref(torch.tensor([before_zero]), 1).item() == 2.0**-33


def test_top_p_stops_where_the_mass_is_reached_exactly():
    kept = truncate_ref(torch.tensor([[0.5, 0.25, 0.25]]).log(), None, 0.5).isfinite()
    assert kept.tolist() == [[True, False, False]]


@pytest.mark.parametrize("draw", [sample, sample_ref])
def test_equal_logits_go_by_the_lower_id(draw, device):
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, -1.0]], device=device)
    zero = zeros(1).to(device)
    tokens, _, ids, _ = draw(logits, zero, zero, temperature=0.0, num_top=6)
    assert tokens.tolist() == [1] and sorted(ids[0, :2].tolist()) == [1, 3] and ids[0, 5] == 5


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.some(6)
def test_triton_agrees_with_fp64(size, dtype, temperature, sample_triton, fresh):
    inputs = fresh(4, size, dtype)
    settings = {"temperature": temperature, "num_top": 4}
    if not temperature:
        inputs[0][torch.arange(4), torch.randint(size, (4,))] = 20.0  # ties have a test of their own
    assert_agrees(sample_triton(*inputs, **settings), *inputs, **settings)
    assert_agrees(sample_triton(*inputs, temperature=temperature), *inputs, temperature=temperature)


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.8}, {"top_k": 200, "top_p": 0.6}])
@pytest.mark.some(5)
def test_triton_truncates(size, settings, sample_triton, fresh):
    inputs = fresh(4, size)
    settings = settings | {"temperature": 1.3, "num_top": 5}  # of which some are cut off
    got, expected = sample_triton(*inputs, **settings), sample_ref(*inputs, **settings)
    assert_agrees(got, *inputs, **settings)
    kept = expected[3].isfinite()  # the order of those cut off is anyone's
    assert torch.equal(got[2][kept], expected[2][kept]) and torch.equal(got[3].isfinite(), kept)


def test_triton_with_keys_and_indices_at_the_limits(sample_triton, fresh, device):
    pairs = [(key, index) for key in LIMITS for index in (0, 1 << 31, (1 << 63) - 1)]
    keys, index = (torch.tensor(column, device=device) for column in zip(*pairs, strict=True))
    inputs = (fresh(len(pairs), 258)[0], keys, index)
    assert_agrees(sample_triton(*inputs, temperature=1.0), *inputs, temperature=1.0)


def test_triton_draws_many_tokens_as_the_reference_does(sample_triton, fresh, device):
    """Flat logits, so that the noise alone decides; hundreds of draws over every id."""
    logits, keys, index = fresh(40_000 if device != "cpu" else 150, 50)
    inputs = (torch.zeros_like(logits), keys, index)
    assert_agrees(sample_triton(*inputs, temperature=1.0), *inputs, temperature=1.0)


def test_triton_takes_strided_rows(sample_triton, fresh):
    logits, keys, index = fresh(6, 5100)
    settings = {"temperature": 0.9, "num_top": 3}
    for view in (logits[:, 40:5040], logits[::2, :77], logits[:, ::2], logits.T.contiguous().T, logits[:0]):
        rows = len(view)
        got = sample_triton(view, keys[:rows], index[:rows], **settings)
        if rows:
            assert_agrees(got, view, keys[:rows], index[:rows], **settings)
        assert got[0].shape == got[1].shape == (rows,) and got[2].shape == got[3].shape == (rows, 3)


def test_triton_lists_a_whole_vocabulary(sample_triton, fresh):
    inputs = fresh(2, 40)
    settings = {"temperature": 1.0, "num_top": 40}
    got, expected = sample_triton(*inputs, **settings), sample_ref(*inputs, **settings)
    assert torch.equal(got[2], expected[2])
    torch.testing.assert_close(got[3], expected[3], atol=1e-5, rtol=0)


def test_triton_breaks_ties_across_blocks_by_the_lower_id(sample_triton, fresh):
    logits, keys, index = fresh(2, 9000)
    logits = logits.clamp(max=2.0)
    for id in (8999, 17, 4096, 8192, 4095):
        logits[:, id] = 30.0
    tokens, _, ids, _ = sample_triton(logits, keys, index, temperature=0.0, num_top=5)
    assert tokens.tolist() == [17, 17] and ids.tolist() == [[17, 4095, 4096, 8192, 8999]] * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_triton_copes_with_blocks_of_minus_infinity(temperature, sample_triton, fresh):
    inputs = fresh(3, 9000)
    inputs[0][0, :4096] = float("-inf")
    inputs[0][1, 4096:] = float("-inf")
    inputs[0][2] = float("-inf")
    inputs[0][2, 8998:] = torch.tensor([1.0, 2.0])
    settings = {"temperature": temperature, "num_top": 4}
    got = sample_triton(*inputs, **settings)
    assert_agrees(got, *inputs, **settings)
    assert got[2][2].tolist() == [8999, 8998, 0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.some(4)
def test_what_is_not_finite_gives_a_logprob_that_is_not(temperature, size, sample_triton, fresh):
    logits, keys, index = fresh(6, size)
    logits[0, size - 1] = float("nan")
    logits[1, 0] = float("inf")
    logits[2] = float("nan")
    logits[3] = torch.tensor(float("nan")).neg()
    logits[4] = float("-inf")
    for draw in (sample_triton, sample_ref):
        tokens, logprobs, ids, _ = draw(logits, keys, index, temperature=temperature, num_top=5)
        assert logprobs.isfinite().tolist() == [False] * 5 + [True]
        assert (tokens >= 0).all() and (tokens < size).all() and (ids >= 0).all() and (ids < size).all()


def test_any_allowed_temperature_gives_a_number(sample_triton, fresh):
    logits, keys, index = fresh(2, 300)
    logits[:, 7] = float("-inf")
    tokens, logprobs, _, _ = sample_triton(logits, keys, index, temperature=1e300)
    assert logprobs.isfinite().all() and 7 not in tokens.tolist()


@pytest.mark.parametrize("settings", [{}, {"num_top": 20}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_a_cuda_graph_holds_it(settings, fresh, device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    first, second = fresh(8, 20_000, torch.bfloat16), fresh(8, 20_000, torch.bfloat16)
    static = [tensor.clone() for tensor in first]
    sample(*static, temperature=0.8, **settings)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(*static, temperature=0.8, **settings)
    for inputs in (first, second):
        for tensor, value in zip(static, inputs, strict=True):
            tensor.copy_(value)
        graph.replay()
        for got, expected in zip(out, sample(*inputs, temperature=0.8, **settings), strict=True):
            assert expected is None or torch.equal(got, expected)


def test_noise_is_precise_where_it_decides(sample_triton, device):
    """Logits that cancel the noise, and one token two hundred-thousandths ahead."""
    keys, index = torch.arange(16) * 7919, torch.zeros(16, dtype=torch.int64)
    logits = (-torch.log1p(-uniform_ref(token_keys_ref(keys, index), 4096).double())).log()
    logits[:, 100] += 2e-5
    tokens = sample_triton(logits.float().to(device), keys.to(device), index.to(device), temperature=1.0)[0]
    assert tokens.tolist() == [100] * 16


def test_a_short_list_over_many_blocks(sample_triton, device):
    """As many of the best as there are blocks with one, and more than there are blocks."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    spread = torch.zeros(1, 5 * 4096, device=device)
    spread[0, torch.arange(5) * 4096 + 7] = torch.tensor([10.0, 9.0, 8.0, 7.0, 6.0], device=device)
    assert sample_triton(spread, zero, zero, temperature=0.0, num_top=3)[2].tolist() == [[7, 4103, 8199]]
    many = torch.randperm(16 * 4096, device=device)[None] / (16 * 4096)  # no two alike
    many[0, ::4096] = 10.0 + torch.arange(16, device=device)
    ids = sample_triton(many, zero, zero, temperature=0.0, num_top=20)[2]
    assert ids.tolist() == many.topk(20, dim=-1).indices.tolist()


def test_blocks_that_no_list_can_take_from_are_not_read_again(device):
    triton = pytest.importorskip("sparse_rl.kernels.sampling_triton", exc_type=ImportError)
    logits = torch.randn(2, 5 * triton.BLOCK, device=device)
    blocks = logits.unflatten(1, (5, triton.BLOCK))
    for row, matter in enumerate(([1, 4], [0, 3])):
        blocks[row, matter] += 20.0
    maxima = blocks.amax(-1)
    expected = logits.topk(2).indices
    below = maxima < 10.0
    blocks[below] = float("nan")
    top = torch.empty(2, 5, 2, dtype=torch.int64, device=device)
    shared = {"row_stride": logits.stride(0), "size": logits.shape[1], "inverse": 1.0, "num_blocks": 5, "num_top": 2}
    triton._sample_top[2, 5](
        logits, maxima, top, **shared, BLOCK=triton.BLOCK, BLOCKS=16, LIST=2, num_warps=triton.WARPS
    )
    assert below.sum() == 6 and (top[below] == triton.LOWEST.value).all()
    ids = (1 << 31) - 1 - (top.flatten(1).topk(2).values & (1 << 31) - 1)
    assert torch.equal(ids, expected)
