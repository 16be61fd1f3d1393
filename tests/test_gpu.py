"""What only a CUDA GPU can show; run with `-m gpu`."""

import pytest
import torch
from interpreted import SIZES, dense, every_function, results
from interpreted import inputs as pointwise_inputs
from test_normalizers import CASES, every_case, inputs, made
from test_training import losses

from lm.attention.kernels import Pointwise, pointwise, why_tiles
from lm.attention.lengths import Rows
from lm.loss import linear_cross_entropy
from lm.training.run import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@every_case
def test_bf16_on_the_gpu_is_as_near_the_definition_as_the_definition_in_bf16(options: object):
    length = 300
    q, k, v = inputs(length, torch.bfloat16, size=64)
    exact = made(options).weights(q.double(), k.double(), Rows.full(length)) @ v.double()
    q, k, v = (x.cuda() for x in (q, k, v))
    normalizer, rows = made(options, torch.float32).cuda(), Rows.full(length, "cuda")
    with torch.no_grad():
        fast = normalizer(q.float(), k.float(), v, rows).cpu()
        plain = (normalizer.weights(q, k, rows) @ v).cpu()
    assert (fast - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2**-8


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs compute capability 8.0")
@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "size", "width"), [*SIZES, (1000, 64, 64), (1000, 128, 128), (300, 128, 1536)])
def test_the_triton_kernel_is_the_definition_forward_and_backward(f: Pointwise, dtype: torch.dtype, length: int, size: int, width: int):
    """fp32 to 1e-5, which TF32 would miss; bf16 to twice the error of the definition in bf16, and two roundings."""
    assert why_tiles(torch.device("cuda"), dtype, size) == ""
    given = pointwise_inputs(length, size, width, dtype, rows=3)
    exact = results(dense, f, *(x.double() for x in given))
    on_gpu = [x.cuda() for x in given]
    found, again, plain = (results(route, f, *on_gpu) for route in (pointwise, pointwise, dense))
    for a, b, c, d in zip(found, again, plain, exact, strict=True):
        assert torch.equal(a, b)
        allowed = 1e-5 * max(1.0, d.abs().max()) if dtype == torch.float32 else 2 * (c.cpu() - d).abs().max() + 2**-7 * d.abs().max()
        assert (a.cpu() - d).abs().max() <= allowed


def test_the_gpu_gives_the_cpus_loss_and_gradients():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3000, 64, generator=generator), torch.randn(5000, 64, generator=generator) * 0.1
    targets = torch.randint(5000, (3000,), generator=generator)
    found = {}
    for device in ("cpu", "cuda"):
        h, w = (x.detach().to(device).requires_grad_() for x in (hidden, weight))
        loss = linear_cross_entropy(h, w, targets.to(device))
        loss.backward()
        found[device] = [loss.item(), h.grad.cpu(), w.grad.cpu()]
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=1e-5)
    for a, b in zip(found["cuda"][1:], found["cpu"][1:], strict=True):
        assert torch.allclose(a, b, atol=2e-4)


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("name", sorted({options.name for options in CASES.values()}))
def test_a_gpu_run_learns_as_the_cpu_run_does_and_resumes_exactly(tiny, name: str, compiled: str):
    common = [f"model.normalizer={name}", "trainer.max_steps=20", "trainer.checkpoint_every=10"]
    gpu = [*common, "trainer.accelerator=gpu", "trainer.precision=bf16-mixed", f"trainer.compile={compiled}"]
    cpu = tiny("name=cpu", *common)
    whole, parts = tiny("name=whole", *gpu), tiny("name=parts", *gpu, "resume=auto")
    train(cpu)
    train(whole)
    train(parts)
    checkpoints = parts.run_folder / "checkpoints"
    (checkpoints / "last.ckpt").unlink()
    (checkpoints / "step-000010.ckpt").rename(checkpoints / "last.ckpt")
    train(parts)
    assert losses(whole.run_folder) == pytest.approx(losses(cpu.run_folder), abs=0.05)
    assert losses(parts.run_folder) == pytest.approx(losses(whole.run_folder), abs=1e-3)
