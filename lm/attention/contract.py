"""This module checks the promises that every normalizer keeps. Tests run the checks on lm's normalizers, and `lm
check-normalizer` runs them on plugins. The first paragraph of a check's docstring is the promise. The second is a hint
for the author of a normalizer that breaks it.

Shapes: B = 2 sequences, H = `HEADS` heads, T queries, S keys, D head size, L = `TRAIN_LENGTH`; `WIDTH` is the layer
input's width. Unless a check says otherwise, tensors are in fp64.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lm.attention.catalogue import make_normalizer
from lm.attention.elementwise_sums import SCORE_MAPS
from lm.attention.layout import AttentionLayout, attend_by_document
from lm.attention.normalizer import LayerSpec, Normalizer, concat_features_by_kv_head
from lm.attention.options import Options
from lm.attention.query_scale import Softmax
from lm.errors import one_line

HEADS, HEAD_SIZE, WIDTH, TRAIN_LENGTH = 4, 16, 12, 64
# first words of the problem where a check ends in an error other than an AssertionError of its own
ERROR_PREFIX = "stopped by"
MAX_ERROR_RATIO = 10  # errors under bf16 autocast may be this many times softmax's


def random_normalizer(
    options: Options, dtype: torch.dtype = torch.float64, head_size: int = HEAD_SIZE, train_length: int = TRAIN_LENGTH
) -> Normalizer:
    """Return a normalizer with random parameters, which are the same at each call. Vectors have their initial values
    plus noise of standard deviation 0.1; matrices hold such noise alone.

    train_length: tokens in a training sequence.
    """
    normalizer = make_normalizer(options, LayerSpec(HEADS, head_size, WIDTH, train_length)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in normalizer.parameters():
            if parameter.dim() == 2:
                parameter.zero_()  # initial values of matrices may be random
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype))
    return normalizer


def random_inputs(
    length: int,
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
    head_size: int = HEAD_SIZE,
    normalizer: Normalizer | None = None,
) -> list[Tensor]:
    """Return random q, k and v, each (batch, HEADS, length, head_size), which are the same at each call.

    With `normalizer`, q and k also hold the features that the normalizer computes from a random layer input, and so are
    wider than `head_size`.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, head_size, generator=generator, dtype=torch.float64) for _ in range(3))
    if normalizer is not None:
        x = torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)
        q, k = (heads.detach() for heads in normalizer.append_features(x, q, k))
    return [q.to(dtype), k.to(dtype), v.to(dtype)]


def named_output_and_gradients(
    normalizer: Normalizer, output: Tensor, leaves: list[Tensor], grad: Tensor
) -> dict[str, Tensor]:
    """Return `output`, and the gradients of the sum of `grad` x `output`, by name.

    The gradients are those for q, k, v (`leaves`) and the normalizer's parameters. The gradient of a tensor on which
    `output` does not depend is 0.
    """
    parameters = dict(normalizer.named_parameters())
    sources = [*leaves, *parameters.values()]
    grads = torch.autograd.grad(output, sources, grad, allow_unused=True, materialize_grads=True)
    names = (f"gradient of {name}" for name in ("q", "k", "v", *(f"the parameter {name}" for name in parameters)))
    return {"output": output.detach(), **dict(zip(names, grads, strict=True))}


def require(condition: bool | Tensor, message: str) -> None:
    """Raise AssertionError with `message` if `condition` is false. If `condition` is a tensor, the index of the first
    false entry is added to the message.
    """
    if not torch.as_tensor(condition).all():
        entry = f", at entry {(~condition).nonzero()[0].tolist()}" if isinstance(condition, Tensor) else ""
        raise AssertionError(message + entry)


def assert_close(actual: Tensor, expected: Tensor, name: str, atol: float = 1e-10) -> None:
    """Raise AssertionError unless `actual` has the dtype, the shape and the entries of `expected`.

    Entries may differ by `atol`; differences that are not finite always fail. The message gives the entry that differs
    most.
    """
    descriptions = [f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}" for x in (actual, expected)]
    require(descriptions[0] == descriptions[1], f"the {name} is {descriptions[0]}, not {descriptions[1]}")
    actual, expected = actual.detach(), expected.detach()
    error = (actual - expected).abs().nan_to_num(math.inf)
    entry = torch.unravel_index(error.argmax(), error.shape)
    message = f"the {name} is {float(actual[entry]):.6g}, not {float(expected[entry]):.6g}"
    require(bool(error[entry] <= atol), f"{message}, at entry {[int(index) for index in entry]}")


def assert_matches_definition(
    normalizer: Normalizer,
    route: Callable[[Tensor, Tensor, Tensor, AttentionLayout], Tensor],
    leaves: list[Tensor],
    layout: AttentionLayout,
    atol: float = 1e-10,
) -> None:
    """Raise AssertionError unless `route` and the definition, `normalizer.weights` @ v, agree in output and gradients,
    up to `atol`.

    The gradients are those for q, k, v (`leaves`) and the normalizer's parameters.
    """
    results = []
    for function in (route, lambda q, k, v, layout: normalizer.weights(q, k, layout) @ v):
        tensors = [x.detach().requires_grad_() for x in leaves]
        output = function(*tensors, layout)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append(named_output_and_gradients(normalizer, output, tensors, grad.to(output.dtype)))
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, name, atol)


def assert_decoding_matches(
    normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor, expected: Tensor, steps: list[int]
) -> None:
    """Raise AssertionError unless `decode` gives `expected`, the output for all tokens.

    `decode` is called for the first `steps[0]` tokens, then for the next `steps[1]`, and so on.
    """
    start, state, outputs = 0, None, []
    for step in steps:
        step_slice, layout = slice(start, start + step), AttentionLayout.continuation(start, step, expected.size(2))
        output, state = normalizer.decode(*(x[:, :, step_slice] for x in (q, k, v)), layout, state)
        start += step
        outputs.append(output)
    assert_close(
        torch.cat(outputs, 2), expected, f"output of `decode` in steps of {', '.join(map(str, steps[:5]))} ... tokens"
    )


# ---------------------------------------------------------------- the promises


def check_initial_values(options: Options) -> None:
    """the normalizer gives an output, and its parameters start at the same values each time, except weight matrices of
    layers named `hidden`

    draw no random numbers in `initialise`; if a matrix must start at random values, make it the weight of a linear
    layer named `hidden`: the model then draws its initial values
    """
    q, k, v = random_inputs(5, normalizer=(normalizer := random_normalizer(options)))
    layout = AttentionLayout.full(5)
    _require_shape("`weights`", normalizer.weights(q, k, layout), (*q.shape[:3], k.size(2)))
    _require_shape("`forward`", normalizer(q, k, v, layout), (*q.shape[:3], v.size(-1)))
    with torch.random.fork_rng([]):
        first_normalizer, second_normalizer = (
            make_normalizer(options, LayerSpec(HEADS, HEAD_SIZE, WIDTH, TRAIN_LENGTH)) for _ in range(2)
        )
    for (name, a), b in zip(first_normalizer.named_parameters(), second_normalizer.parameters(), strict=True):
        require(name.endswith("hidden.weight") or torch.equal(a, b), f"the parameter {name} is drawn")


def _require_shape(name: str, x: object, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless `x` is a tensor of this shape whose numbers are all finite.

    The first check calls this function, since a wrong output would make all other checks fail with errors that hide the
    cause.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} gives {type(x).__name__}, not a tensor")
    if x.shape != shape:
        raise ValueError(f"{name} gives shape {tuple(x.shape)}; wanted is {shape}")
    if not x.isfinite().all():
        raise ValueError(
            f"{name} gives numbers that are not finite; a row without weight is divided by lm.attention.routes."
            "divide_rows"
        )


def check_fast_path(options: Options) -> None:
    """outputs and gradients of `forward` are those of `weights(q, k, layout)` @ v, for heads of 1, 16 and 40 dimensions

    `forward` must compute the same function, in whatever way; a class without a `forward` of its own keeps this promise
    """
    for head_size in (1, 16, 40):
        normalizer = random_normalizer(options, head_size=head_size)
        for length in (1, 2, 7, 64, 129):
            leaves = random_inputs(length, head_size=head_size, normalizer=normalizer)
            assert_matches_definition(normalizer, normalizer, leaves, AttentionLayout.full(length), 1e-10 * length)


def check_finite_differences(options: Options) -> None:
    """gradients agree with finite differences

    nothing between q, k, v and the output may be detached, read with `item()` or changed in place
    """
    normalizer, layout = random_normalizer(options, head_size=4), AttentionLayout.full(6)
    names = [name for name, _ in normalizer.named_parameters()]

    def attend(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(normalizer, dict(zip(names, values, strict=True)), (q, k, v, layout))

    tensors = *random_inputs(6, batch=1, head_size=4, normalizer=normalizer), *normalizer.parameters()
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    is_right = torch.autograd.gradcheck(attend, leaves, eps=1e-6, atol=1e-6, fast_mode=True, raise_exception=False)
    require(is_right, "a gradient of q, k, v or a parameter is not that of finite differences")


def check_n_per_query(options: Options) -> None:
    """each query has its own n and mask: if the position and the document length of one query change, no other query's
    weights change

    n is the number of keys that a query sees; `row_length(layout)`, (1, T) or (B, 1, T), has one n for each query.
    `.unsqueeze(-1)` adds the dimension of keys
    """
    normalizer, length, moved_query = random_normalizer(options), 6, 3
    q, k, _ = random_inputs(length, batch=1, normalizer=normalizer)
    positions = torch.arange(length) + length  # every query sees every key
    shifted_positions = positions + 7 * (positions == positions[moved_query])
    layouts = (
        AttentionLayout(queries, torch.arange(length), queries + 9, mask_is_triangular=False)
        for queries in (positions, shifted_positions)
    )
    is_other = torch.arange(length) != moved_query
    # (1, H, 5, S); NaN: no keys
    old_rows, new_rows = (normalizer.weights(q, k, layout)[:, :, is_other].nan_to_num() for layout in layouts)
    message = f"a number that belongs to query {moved_query} changes other queries' weights"
    require(torch.allclose(new_rows, old_rows, rtol=0, atol=1e-12), message)


def check_declared_sums(options: Options) -> None:
    """keys after the query have weight 0; whether each query's weights sum to one (or are all 0) is as the options
    declare

    set weights to 0 where `layout.visible()` is false; the options' attribute `sums_to_one`, or the value `sum` of
    their key `n`, declares that weights sum to one
    """
    normalizer, layout = random_normalizer(options), AttentionLayout.full(33)
    weights = normalizer.weights(*random_inputs(33, normalizer=normalizer)[:2], layout)
    require(weights.triu(1) == 0, "a key after the query has weight")
    sums = weights.sum(-1)
    sums_to_one = torch.allclose(sums[sums != 0], torch.ones((), dtype=sums.dtype))
    is_declared = options.rows_sum_to_one
    require(
        sums_to_one == is_declared,
        f"`sums_to_one` is {is_declared}, the sums of rows go from {sums.min():.4g} to {sums.max():.4g}",
    )


def check_query_independence(options: Options) -> None:
    """the weights of a query depend on its own scores of visible keys alone

    take sums, means and thresholds over the last axis, keys, after masking the scores of keys that `layout.visible()`
    hides
    """
    normalizer, layout = random_normalizer(options), AttentionLayout.from_document_lengths([6, 5])
    q, k, _ = random_inputs(11, batch=1, normalizer=normalizer)
    scores = normalizer.unmasked_scores(q, k, layout)
    require(
        normalizer.normalize(scores, layout) == normalizer.weights(q, k, layout),
        "`weights` are not `normalize(scores)`",
    )
    # (T, S, T, S)
    jacobian = torch.autograd.functional.jacobian(lambda z: normalizer.normalize(z, layout)[0, 0], scores)[:, :, 0, 0]
    query = torch.arange(11)
    row_jacobian = jacobian[query, :, query].clone()  # (T, S, S)
    jacobian[query, :, query] = 0
    require(jacobian == 0, "a weight depends on a score of another query")
    hidden_entries = row_jacobian.masked_fill(layout.visible()[0, 0].unsqueeze(1), 0.0)
    require(hidden_entries == 0, "a weight depends on the score of a key that is not seen")


def check_scale_by_position(options: Options) -> None:
    """in a sequence of the training length scores are q.k / sqrt(D) times `scale_by_position`, unless that is None

    `scale_by_position` is (H, L), the factor at each of the L positions of a training sequence; None says that there is
    no such factor
    """
    normalizer = random_normalizer(options)
    q, k, _ = random_inputs(TRAIN_LENGTH, normalizer=normalizer)
    if (factor := normalizer.scale_by_position()) is not None:
        expected = factor.unsqueeze(-1) * (q @ k.transpose(-2, -1)) / math.sqrt(HEAD_SIZE)
        assert_close(normalizer.unmasked_scores(q, k, AttentionLayout.full(TRAIN_LENGTH)), expected, "score")


def check_score_map(options: Options) -> None:
    """keys that are not `visible` have weight 0; if `score_map` is set, other weights are that function of their
    scores, times a factor per query

    leave `score_map` empty if no function of each score, times a factor per query, gives the weights
    """
    normalizer, layout = random_normalizer(options), AttentionLayout.full(33)
    q, k, _ = random_inputs(33, normalizer=normalizer)
    weights, visible = normalizer.weights(q, k, layout), normalizer.visible(layout)
    require(weights.masked_fill(visible, 0.0) == 0, "a key that is not visible has weight")
    if normalizer.score_map:
        scores = normalizer.unmasked_scores(q, k, layout)
        score_values = SCORE_MAPS[normalizer.score_map](scores).masked_fill(~visible, 0.0)
        factor = (weights * score_values).sum(-1, keepdim=True) / score_values.square().sum(-1, keepdim=True).clamp(
            min=1e-300
        )
        name = f"weight, by `score_map` {normalizer.score_map} of its score,"
        assert_close(weights, factor * score_values, name, 1e-12)


def check_causality(options: Options) -> None:
    """later tokens change no earlier output, to the bit

    mask by `layout.visible()` before anything is computed from all scores of a query, and sum over visible keys alone
    """
    changes = changes_by_later_tokens(random_normalizer(options), 40, 25)
    require(changes == 0, "other tokens from 25 on change an earlier output")


def changes_by_later_tokens(normalizer: Normalizer, length: int, first_changed: int) -> Tensor:
    """Return how much the outputs of earlier tokens change if the tokens from `first_changed` on change.

    The result is |differences|, (B, H, first_changed, D).
    """
    q, k, v = random_inputs(length, normalizer=normalizer)
    outputs = []
    for _ in range(2):
        outputs.append(normalizer(q, k, v, AttentionLayout.full(length))[:, :, :first_changed])
        for x in (q, k, v):
            x[:, :, first_changed:] += 3.0
    return (outputs[0] - outputs[1]).abs()


def check_decoding(options: Options) -> None:
    """decoding, in steps of one or several tokens, gives the output of one call, also with keys and values that two
    query heads share

    n and masks come from the layout alone: when decoding there are fewer queries than keys (T < S). An overridden
    `decode` gets keys and values of fewer heads than queries; `expand_kv_heads` copies them for all query heads
    """
    normalizer, length = random_normalizer(options), 30
    q, k, v = random_inputs(length, normalizer=normalizer)
    shared_k = torch.cat((k[:, ::2, :, :HEAD_SIZE], concat_features_by_kv_head(k[..., HEAD_SIZE:], HEADS // 2)), -1)
    for keys, values, steps in ((k, v, [1] * length), (k, v, [5, 1, 1, 16, 7]), (shared_k, v[:, ::2], [5, 1, 17, 7])):
        expected = normalizer(q, *normalizer.expand_kv_heads(keys, values), AttentionLayout.full(length))
        assert_decoding_matches(normalizer, q, keys, values, expected, steps)


def check_packed_documents(options: Options) -> None:
    """each document has the same output alone, packed into a sequence with others, and padded to another document's
    length

    n is `row_length(layout)` or `layout.n(policy)`, never a size of q, k or the scores. With packed documents positions
    are (B, T), `layout.visible()` is (B, 1, T, S), and `row_length(layout)` is (B, 1, T)
    """
    normalizer = random_normalizer(options)
    positions = torch.stack([torch.cat([torch.arange(n) for n in sizes]) for sizes in ([5, 1, 19, 8], [16, 17], [33])])
    leaves = random_inputs(33, batch=3, normalizer=normalizer)
    for route in (partial(attend_by_document, normalizer), normalizer):
        assert_matches_definition(normalizer, route, leaves, AttentionLayout.from_positions(positions))


def check_one_device(options: Options) -> None:
    """all tensors are on the device of the inputs (tested on torch's device `meta`, where operands on two devices raise
    an error)

    make new tensors with `device=scores.device`, and keep tables by `register_buffer`
    """
    normalizer = make_normalizer(options, LayerSpec(HEADS, HEAD_SIZE, WIDTH, TRAIN_LENGTH)).to("meta")
    require(all(parameter.is_meta for parameter in normalizer.parameters()), "a parameter does not move")
    x = torch.empty(2, 20, WIDTH, device="meta")
    q = k = v = torch.empty(2, HEADS, 20, HEAD_SIZE, device="meta", requires_grad=True)
    q, k = (heads.detach().requires_grad_() for heads in normalizer.append_features(x, q, k))
    positions = torch.empty(2, 20, dtype=torch.int64, device="meta")
    for layout in (AttentionLayout.full(20, "meta"), AttentionLayout.from_positions(positions)):
        require(normalizer.weights(q, k, layout).is_meta, "weights are on another device")
        output = normalizer(q, k, v, layout)
        output.backward(torch.empty_like(output))
    state = None
    for start in (0, 20):
        output, state = normalizer.decode(q, k, v, AttentionLayout.continuation(start, 20, 40, "meta"), state)
        require(output.is_meta, "the output of `decode` is on another device")


def check_extreme_scores(options: Options) -> None:
    """extreme and identical scores give finite outputs and gradients in fp32

    subtract a row's largest score before exp, and divide by sums that may be 0 with `lm.attention.routes.divide_rows`
    """
    for fill in (0.0, 1e4, -1e4):
        normalizer = random_normalizer(options, torch.float32)
        q, k, v = leaves = [x.requires_grad_() for x in random_inputs(50, torch.float32, normalizer=normalizer)]
        large_q = torch.cat((q[..., :HEAD_SIZE] * 0 + (fill or 1.0), q[..., HEAD_SIZE:]), -1)
        large_k = torch.cat((k[..., :HEAD_SIZE] * (1e4 if fill else 0.0) + fill, k[..., HEAD_SIZE:]), -1)
        output = normalizer(large_q, large_k, v, AttentionLayout.full(50))
        for name, x in named_output_and_gradients(normalizer, output, leaves, torch.ones_like(output)).items():
            require(x.isfinite(), f"the {name} is not finite, with queries and keys about {fill:g}")


def check_autocast_weights(options: Options) -> None:
    """weights are in fp32, under autocast and for bf16 inputs, too

    override `normalize` and `define_scores`, which are called without autocast, instead of `weights`
    """
    normalizer, layout = random_normalizer(options, torch.float32), AttentionLayout.full(20)
    q, k, _ = random_inputs(20, torch.float32, normalizer=normalizer)
    weights = normalizer.weights(q, k, layout)
    with torch.autocast("cpu", torch.bfloat16):
        weights_in_autocast = normalizer.weights(q, k, layout)
        bf16_weights = normalizer.weights(q.bfloat16(), k.bfloat16(), layout)
    require(weights_in_autocast == weights, "a weight under autocast differs from that without")
    require(
        bf16_weights.dtype == torch.float32,
        f"the weights of bf16 inputs are in {str(bf16_weights.dtype).removeprefix('torch.')}",
    )


def check_autocast_errors(options: Options) -> None:
    """under bf16 autocast the errors of outputs and gradients against fp64 are at most 10 times softmax's

    an overridden `forward` computes scores, sums and thresholds in fp32, whatever the dtype of v
    """
    errors, base = _autocast_errors(options), _autocast_errors(Softmax())
    for name, largest in base.items():
        message = f"the relative error of the {name} is {errors[name]:.2g}, softmax's is {largest:.2g}"
        require(errors[name] <= MAX_ERROR_RATIO * largest, message)


def _autocast_errors(options: Options) -> dict[str, float]:
    """Return the relative errors of output and gradients under bf16 autocast, by name, against the same in fp64.

    The error of x is |x - x_fp64| / |x_fp64|. q and k are in fp32 and v is in bf16, as in training.
    """
    results = []
    for dtype in (torch.float64, torch.float32):
        normalizer = random_normalizer(options, dtype)
        q, k, v = (x.bfloat16().to(dtype) for x in random_inputs(256, normalizer=normalizer))
        leaves = [x.requires_grad_() for x in (q, k, v if dtype == torch.float64 else v.bfloat16())]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            output = normalizer(*leaves, AttentionLayout.full(256))
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(output.dtype)
        results.append(named_output_and_gradients(normalizer, output, leaves, grad))
    exact, rounded = results
    return {name: float((rounded[name].double() - x).norm() / x.norm().clamp(min=1e-30)) for name, x in exact.items()}


CHECKS: tuple[Callable[[Options], None], ...] = (
    check_initial_values,
    check_n_per_query,
    check_fast_path,
    check_finite_differences,
    check_declared_sums,
    check_query_independence,
    check_scale_by_position,
    check_score_map,
    check_causality,
    check_decoding,
    check_packed_documents,
    check_one_device,
    check_extreme_scores,
    check_autocast_weights,
    check_autocast_errors,
)


def check_promises(
    options: Options, failure_and_check_command: Callable[[BaseException], tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield (promise, problem) for each check of a normalizer with these options. A problem says what the check finds
    wrong, with a hint; it is empty if the promise is kept.

    `failure_and_check_command`, a method of `lm.plugins.Plugins`, is called with each error other than a check's own
    AssertionError. Its first text says where a plugin's code raised the error, and is added to the problem. If the
    first check ends in such an error, later checks are not run, as each would end in that error.
    """
    for check in CHECKS:
        promise, hint = (" ".join(part.split()) for part in f"{check.__doc__}\n\n".split("\n\n")[:2])
        try:
            check(options)
            problem = ""
        except Exception as error:  # whatever code from outside raises
            problem = one_line(error)
            if not (isinstance(error, AssertionError) and problem):
                location, _ = failure_and_check_command(error)
                problem = f"{ERROR_PREFIX} {type(error).__name__}: {problem}" + (f"; {location}" if location else "")
        if check is CHECKS[0] and problem.startswith(ERROR_PREFIX):
            yield promise, problem
            return
        yield promise, problem and f"{problem}; hint: {hint}"
