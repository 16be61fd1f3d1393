"""What only a CUDA GPU can show; run with `-m gpu`, or all that needs a GPU with `bash scripts/gpu_check.sh`."""

import os

import pytest
import torch
from folders import last_checkpoint, training_losses
from interpreted import SIZES, dense_attention, either_sum, every_function, output_and_gradients
from interpreted import attention_inputs as kernel_inputs
from test_autocast import check_errors
from test_normalizers import CASES, every_case
from torch import Tensor

from lm.attention import catalogue, gpu_kernels
from lm.attention.contract import random_inputs, random_normalizer
from lm.attention.elementwise_sums import elementwise_attention, why_no_triton
from lm.attention.layout import AttentionLayout, attend_by_document
from lm.model.cross_entropy import Head, summed_training_loss
from lm.training.lightning_import import L
from lm.training.train import train

HAS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")]
NAMES = sorted(catalogue.OPTIONS_BY_NAME)


@pytest.fixture(autouse=True)
def _no_error_is_left(request: pytest.FixtureRequest):
    """After an illegal memory access no CUDA call of the process works: end it. pytest-xdist starts another one for the
    other tests.
    """
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"{request.node.nodeid}: {error}", 1)
        os._exit(1)


COMPILED = ("softmax", "ssmax", "relu2", "entmax15", "linear", "window")  # one of each kind of kernel
GPU = ["trainer.accelerator=gpu", "trainer.precision=bf16-mixed"]


@every_case
def test_the_gpu_gives_the_definition_forward_backward_packed_and_decoding(options: object):
    length, sizes = 130, [40, 1, 72, 17]
    normalizer, exact = random_normalizer(options, torch.float32).cuda(), random_normalizer(options)
    q, k, v = random_inputs(length, normalizer=exact)
    fast = [x.float().cuda().requires_grad_() for x in (q, k, v)]
    slow = [x.requires_grad_() for x in (q, k, v)]

    def close(actual: Tensor, expected: Tensor, label: str) -> None:
        error = (actual.double().cpu() - expected).abs().max()
        assert error <= 1e-4 * max(1.0, expected.abs().max()), f"{label}: {error}"

    layout, on_gpu = AttentionLayout.full(length), AttentionLayout.full(length, "cuda")
    weights = exact.weights(*slow[:2], layout)
    close(normalizer.weights(*fast[:2], on_gpu), weights, "weights")
    expected, actual = weights @ slow[2], normalizer(*fast, on_gpu)
    close(actual, expected, "forward")
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    cases = [
        ([*leaves, *module.parameters()], out)
        for leaves, module, out in ((slow, exact, expected), (fast, normalizer, actual))
    ]
    grads = [
        torch.autograd.grad(out, leaves, grad.to(out), allow_unused=True, materialize_grads=True)
        for leaves, out in cases
    ]
    for number, (a, b) in enumerate(zip(*grads[::-1], strict=True)):
        close(a, b, f"gradient {number}")
    with torch.no_grad():
        close(
            attend_by_document(normalizer, *fast, AttentionLayout.from_document_lengths(sizes, "cuda")),
            exact.weights(*slow[:2], AttentionLayout.from_document_lengths(sizes)) @ slow[2],
            "packed",
        )
        _, state = normalizer.decode(
            *(x[:, :, :100] for x in fast), AttentionLayout.continuation(0, 100, length, "cuda"), None
        )
        later, _ = normalizer.decode(
            *(x[:, :, 100:] for x in fast), AttentionLayout.continuation(100, 30, length, "cuda"), state
        )
        close(later, expected[:, :, 100:], "decode")


@pytest.mark.parametrize("rope", [False, True], ids=["no positions", "rope"])
@pytest.mark.parametrize("name", CASES)
def test_errors_under_autocast_are_at_most_twice_softmaxs(name: str, rope: bool):
    check_errors(name, 1024, rope, "cuda")


@pytest.mark.parametrize("name", [name for name in NAMES if catalogue.normalizer_class(name).gpu_package])
def test_the_kernels_of_others_pass_their_check_and_give_packed_documents(name: str):
    normalizer = random_normalizer(catalogue.OPTIONS_BY_NAME[name](), torch.float32).cuda()
    pytest.importorskip(normalizer.gpu_package)
    q, k, v = (x.cuda() for x in random_inputs(300, torch.bfloat16, normalizer=normalizer.cpu()))
    normalizer.cuda()
    assert gpu_kernels.can_compute(normalizer, q, k, v, AttentionLayout.full(300, "cuda"))
    documents = AttentionLayout.from_document_lengths([40, 1, 242, 17], "cuda")
    expected = attend_by_document(normalizer, q, k, v, documents)
    assert (normalizer.attend(q, k, v, documents) - expected).abs().max() <= expected.abs().max() / 32


@pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability() < (8, 0), reason="needs compute capability 8.0")
@either_sum
@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "size", "width"), [*SIZES, (1000, 64, 64), (1000, 128, 128), (300, 128, 1536)])
def test_the_triton_kernel_is_the_definition_forward_and_backward(
    f: str, dtype: torch.dtype, length: int, size: int, width: int, divide_by_sum: bool
):
    """fp32 to 1e-5, which TF32 would miss; bf16 to twice the error of the definition in bf16, and two roundings."""
    assert why_no_triton(torch.device("cuda"), dtype, size) == ""
    inputs_of_kernel = kernel_inputs(length, size, width, dtype, batch=3)
    exact = output_and_gradients(dense_attention, f, *(x.double() for x in inputs_of_kernel), divide_by_sum)
    on_gpu = [x.cuda() for x in inputs_of_kernel]
    outputs, repeated, plain = (
        output_and_gradients(route, f, *on_gpu, divide_by_sum)
        for route in (elementwise_attention, elementwise_attention, dense_attention)
    )
    for a, b, c, d in zip(outputs, repeated, plain, exact, strict=True):
        assert torch.equal(a, b)
        allowed = (
            1e-5 * max(1.0, d.abs().max())
            if dtype == torch.float32
            else 2 * (c.cpu() - d).abs().max() + 2**-7 * d.abs().max()
        )
        # small sums are divided by
        assert (a.cpu() - d).abs().max() <= allowed + 2e-4 * divide_by_sum * max(1.0, d.abs().max())


def test_the_gpu_gives_the_cpus_loss_and_gradients():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3000, 64, generator=generator), torch.randn(5000, 64, generator=generator) * 0.1
    targets = torch.randint(5000, (3000,), generator=generator)
    by_device = {}
    for device in ("cpu", "cuda"):
        h, head = hidden.detach().to(device).requires_grad_(), Head(64, 5000, softcap=8.0)
        head.weight = torch.nn.Parameter(weight.to(device))
        loss = summed_training_loss(h, head, targets.to(device))
        loss.backward()
        by_device[device] = [loss.item(), h.grad.cpu(), head.weight.grad.cpu()]
    assert by_device["cuda"][0] == pytest.approx(by_device["cpu"][0], rel=1e-5)
    for a, b in zip(by_device["cuda"][1:], by_device["cpu"][1:], strict=True):
        assert torch.allclose(a, b, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_run_learns_as_the_cpu_run_does_and_resumes_exactly(tiny, name: str):
    common = [f"model.normalizer={name}", "trainer.max_steps=20", "trainer.checkpoint_every=10", "eval.every=20"]
    cpu = tiny("name=cpu", *common)
    whole_run = tiny("name=whole", *common, *GPU)
    resumed_run = tiny("name=parts", *common, *GPU, "resume=auto")
    for config in (cpu, whole_run, resumed_run):
        train(config)
    last_checkpoint(resumed_run.run_folder).unlink()
    train(resumed_run)
    assert training_losses(whole_run.run_folder) == pytest.approx(
        training_losses(cpu.run_folder), abs=0.1
    )  # bf16 against fp32
    assert training_losses(resumed_run.run_folder) == pytest.approx(training_losses(whole_run.run_folder), abs=1e-3)


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_run_learns_as_the_eager_one_does(tiny, name: str):
    common = [f"model.normalizer={name}", "trainer.max_steps=20", "eval.every=20", *GPU]
    eager, compiled = tiny("name=eager", *common), tiny("name=compiled", *common, "trainer.compile=true")
    train(eager)
    train(compiled)
    assert training_losses(compiled.run_folder) == pytest.approx(training_losses(eager.run_folder), abs=0.05)


def test_one_process_of_ddp_over_nccl_learns_as_no_ddp_does(tiny, monkeypatch: pytest.MonkeyPatch):
    plain, ddp = tiny("name=alone", *GPU), tiny("name=ddp", *GPU)
    train(plain)
    trainer, strategies = L.Trainer, []

    def with_ddp(**options: object) -> L.Trainer:
        built = trainer(**{**options, "strategy": "ddp"})
        strategies.append(built.strategy)
        return built

    monkeypatch.setattr(L, "Trainer", with_ddp)
    train(ddp)
    assert strategies[0]._get_process_group_backend() == "nccl"
    torch.distributed.destroy_process_group()
    assert training_losses(ddp.run_folder) == pytest.approx(training_losses(plain.run_folder), abs=1e-3)
